"""Train the big LSTM language model, which stalls in float16 without a loss scale: `models.big_lstm` explains why.

The data are the words of Python's manual. Eight updates reach a loss of 5.30 nats a word on test words in float32
(seed 0), and 5.68 in float16 with a scale of 1, where all of 2,048 words alike have 7.62.

>>> import polyamp
>>> losses = list(curve(polyamp.policy("float32"), seed=0, steps=2))
>>> losses[1] < losses[0] < 7.7
True
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import polyamp
from models import big_lstm as task
from models.on_torch.products import summed_in_float32
from models.on_torch.recurrent import LSTM


class BigLSTM(nn.Module):
    def __init__(self, sizes: task.Sizes = task.PUBLISHED) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.words, sizes.projection)
        layers = [LSTM(sizes.projection, sizes.cells, sizes.projection) for _ in range(sizes.layers)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(sizes.projection, sizes.words)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(words)))


def sum_of_losses(model: nn.Module, words: Tensor) -> Tensor:
    scores, targets = model(words[:, :-1]), words[:, 1:]
    return cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum")


def initial(seed: int) -> BigLSTM:
    model = BigLSTM(task.SMALL)
    weights = task.weights(task.SMALL, seed)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    return model


def updates(model: nn.Module, policy: polyamp.Policy, seed: int, steps: int) -> Iterator[float]:
    """Train ``model``, and yield the loss of each update."""
    adam = torch.optim.Adam(model.parameters(), task.LEARNING_RATE, eps=task.EPSILON)
    opt = polyamp.wrap_optimizer(adam, policy)
    for micro_batches in torch.from_numpy(task.batches(seed, steps)).long():
        losses = []
        for words in micro_batches:
            with summed_in_float32(policy):
                with polyamp.autocast(policy):
                    loss = sum_of_losses(model, words) / task.TOKENS
                opt.backward(loss)  # accumulates in the parameters' gradients, which are float32
            losses.append(loss.item())
        opt.step()
        opt.zero_grad()
        yield sum(losses)


def curve(policy: polyamp.Policy, seed: int, steps: int = task.STEPS) -> Iterator[float]:
    """Yield the training loss of each update, in nats per word."""
    return updates(initial(seed), policy, seed, steps)


def train(policy: polyamp.Policy, seed: int) -> dict[str, float]:
    """Return the loss on test words, in nats per word, after training."""
    model, words = initial(seed), torch.from_numpy(task.test_words()).long()
    for _ in updates(model, policy, seed, task.STEPS):
        pass
    with torch.no_grad(), summed_in_float32(policy), polyamp.autocast(policy):
        return {"loss": sum_of_losses(model, words).item() / words[:, 1:].numel()}
