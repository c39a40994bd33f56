"""A word LSTM in PyTorch. It stalls in float16 without a loss scale: docs/tutorials/float16_stall.md."""

from collections.abc import Iterator

import torch
import word_lstm as task
from torch import nn

import polyamp


class WordLSTM(nn.Module):
    def __init__(self, weights: dict) -> None:
        super().__init__()
        self.embedding = nn.Embedding(task.VOCABULARY, task.HIDDEN)
        self.gates = nn.Linear(2 * task.HIDDEN, 4 * task.HIDDEN)
        self.head = nn.Linear(task.HIDDEN, task.VOCABULARY)
        self.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        cell = torch.zeros(len(words), task.HIDDEN)
        states = [cell]
        for word in self.embedding(words).unbind(1):
            taken, kept, shown, new = self.gates(torch.cat([word, states[-1]], 1)).chunk(4, 1)
            cell = kept.sigmoid() * cell + taken.sigmoid() * new.tanh()
            states.append(shown.sigmoid() * cell.tanh())
        return self.head(torch.stack(states[1:], 1))


def loss_of(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    scores, targets = model(words[:, :-1]), words[:, 1:]
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum") / task.TOKENS


def updates(policy: polyamp.Policy, weights: dict, batches: object) -> Iterator[tuple[float, bool]]:
    model = WordLSTM(weights)
    opt = polyamp.wrap_optimizer(torch.optim.Adam(model.parameters(), task.LEARNING_RATE), policy)
    for micro_batches in torch.tensor(batches).long():
        losses = []
        for words in micro_batches:
            with polyamp.autocast(policy):
                losses.append(loss_of(model, words))
            opt.backward(losses[-1])  # accumulates in the parameters' gradients, which are float32
        opt.step()
        opt.zero_grad()
        yield sum(losses).item(), bool(opt.last_step)


def one_step() -> dict:
    weights, batches = task.make_task(steps=1)
    return {"step": loss_of, "args": (WordLSTM(weights), torch.tensor(batches[0, 0]).long()), "rows": task.TOKENS}


if __name__ == "__main__":
    task.main(updates)
