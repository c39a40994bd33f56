"""Train BERT for classification (Devlin et al., 2018), as transformers' `BertForSequenceClassification` has it.

BERT-base, transformers' default, has 12 layers of width 768 with 12 heads: 109,482,240 parameters without the
classifier. `SMALL` has 2 layers of width 64, no dropout, and reads pieces of words; it starts from random weights,
where the table's row is fine-tuned. The data are messages in ten languages, and the language is the class.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR
from transformers import BertConfig, BertForSequenceClassification

import polyamp
from models.data import PAD, START, sentences
from models.on_torch.training import batches, evaluate, fit, seeded

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 32,
    "initializer_range": 0.05,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
LENGTH, STEPS, BATCH, LEARNING_RATE = 16, 300, 32, 1e-3


def bert(**sizes: Any) -> BertForSequenceClassification:
    return BertForSequenceClassification(BertConfig(**sizes))


def small() -> BertForSequenceClassification:
    data = sentences(LENGTH)
    return bert(vocab_size=data.words, num_labels=data.classes, **SMALL)


def scores(model: nn.Module, texts: Tensor) -> Tensor:
    """Return the scores of the classes, which BERT reads at a first mark of its own ([CLS])."""
    texts = torch.cat([torch.full_like(texts[:, :1], START), texts], 1)
    return model(texts, attention_mask=texts != PAD).logits


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    texts, languages = batch
    return nn.functional.cross_entropy(scores(model, texts), languages.long())


def metrics_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    accuracy = (scores(model, batch[0]).argmax(1) == batch[1]).float().mean()
    return {"accuracy": accuracy, "loss": loss_of(model, batch)}


def train(policy: polyamp.Policy, seed: int) -> dict[str, float]:
    """Return accuracy and loss (nats) on test texts, after training."""
    data = sentences(LENGTH)
    model = seeded(small, seed)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.01)
    fit(
        model,
        loss_of,
        batches(data.train, BATCH, STEPS, seed),
        optimizer,
        policy,
        schedule=lambda opt: LinearLR(opt, 1.0, 0.01, STEPS),
        max_grad_norm=1.0,
    )
    return evaluate(model, metrics_of, batches(data.test, 500, 2, seed=0), policy)
