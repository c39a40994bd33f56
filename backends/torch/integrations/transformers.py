"""Hugging Face Trainer: a `transformers.Trainer`, or any subclass, that trains under a policy.

One line of a training script changes:

    Trainer = with_policy(Trainer, "mixed_float16")

    trainer = Trainer(model=model, args=TrainingArguments(...), train_dataset=data)
    trainer.train()

The trainer trains, clips, logs and saves through its accelerator, which `accelerate.prepare` of this package changes.
"""

from __future__ import annotations

from typing import Any

from polyamp.backends.torch.integrations import accelerate
from polyamp.errors import InvalidTypeError, missing_trainer, shown
from polyamp.policies import Policy
from polyamp.policies import policy as make_policy

try:
    import transformers
except ModuleNotFoundError as error:
    raise missing_trainer(error, where=__name__) from error


def with_policy(
    trainer: type[transformers.Trainer], policy: Policy | str | None = None, **options: Any
) -> type[transformers.Trainer]:
    """Return a subclass of a trainer's class, of the same name, that trains, evaluates and predicts under a policy.

    >>> Trainer = with_policy(transformers.Trainer, "mixed_float16")
    >>> Trainer.__name__, issubclass(Trainer, transformers.Trainer)
    ('Trainer', True)

    Args:
        trainer: `transformers.Trainer` or a subclass.
        policy: a policy or its name; None is the current policy.
        **options: options of `polyamp.wrap_optimizer`. The trainer itself clips to
            ``args.max_grad_norm``.

    Raises:
        InvalidTypeError: ``trainer`` is not such a class.
        UsageError: when a trainer is made with ``fp16`` or ``bf16`` in its arguments.
        UnsupportedError: when a trainer is made for DeepSpeed or XLA.
    """
    if not (isinstance(trainer, type) and issubclass(trainer, transformers.Trainer)):
        raise InvalidTypeError(
            "the trainer must be a class of trainers",
            where="with_policy(trainer, policy)",
            found=shown(trainer),
            allowed="transformers.Trainer or a subclass",
            fix="call with_policy(Trainer, policy), and make the trainer from the class that it returns",
        )
    chosen = make_policy(policy)

    class UnderPolicy(trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            accelerate.prepare(self.accelerator, chosen, **options)

    UnderPolicy.__name__, UnderPolicy.__qualname__ = trainer.__name__, trainer.__qualname__
    UnderPolicy.__doc__, UnderPolicy.__module__ = trainer.__doc__, trainer.__module__
    return UnderPolicy
