"""Train a module under torch.compile."""

import digits
import torch

model = torch.compile(digits.model(), backend="aot_eager", fullgraph=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for x, y in digits.batches(5):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
digits.save(losses)
