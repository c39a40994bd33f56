"""Train a classifier: the loop of every tutorial."""

import digits
import torch

model = digits.model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
criterion = torch.nn.CrossEntropyLoss()
losses = []
for x, y in digits.batches(20):
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
with torch.no_grad():
    x, y = digits.batches(1)[0]
    output = model(x)
    losses.append(torch.nn.functional.cross_entropy(output, y).item())
assert output.dtype == torch.float32
digits.save(losses)
