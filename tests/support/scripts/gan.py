"""Train a generator against a discriminator: two optimizers, three backward passes, gradients that nobody uses."""

import digits
import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64), nn.Sigmoid())
discriminator = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1), nn.Sigmoid())
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3)
discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-3)
criterion = nn.BCELoss()
losses = []
for x, _ in digits.batches(12):
    real, fake = torch.ones(len(x), 1), torch.zeros(len(x), 1)
    discriminator.zero_grad()
    loss_real = criterion(discriminator(x), real)
    loss_real.backward()
    images = generator(torch.randn(len(x), 8))
    loss_fake = criterion(discriminator(images.detach()), fake)
    loss_fake.backward()
    discriminator_optimizer.step()
    generator.zero_grad()
    loss = criterion(discriminator(images), real)
    loss.backward()
    generator_optimizer.step()
    losses += [loss_real.item(), loss_fake.item(), loss.item()]
digits.save(losses)
