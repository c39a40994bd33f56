"""Use gradients that ``backward`` did not make: a gradient penalty, an adversarial input, and one set by hand."""

import digits
import torch

model = digits.model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
losses, inputs = [], []
for x, y in digits.batches(8):
    x = x.clone().requires_grad_()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    inputs.append(x.grad.abs().sum().item())
    optimizer.zero_grad()
    adversarial = (x + 0.01 * x.grad.sign()).detach().requires_grad_()
    loss = torch.nn.functional.cross_entropy(model(adversarial), y)
    (slope,) = torch.autograd.grad(loss, adversarial, create_graph=True)
    loss = loss + slope.square().sum()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    by_hand = torch.autograd.grad(torch.nn.functional.cross_entropy(model(x), y), list(model.parameters()))
    for param, grad in zip(model.parameters(), by_hand, strict=True):
        param.grad = grad
    optimizer.step()
    optimizer.step()
digits.save(losses, inputs=inputs)
