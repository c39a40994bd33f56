"""Apex' DCGAN example: two models, two optimizers, three losses, each with its own scale."""
import torch
import torch.nn as nn
import polyamp
from sklearn.datasets import load_digits

digits = load_digits()
images = torch.tensor(digits.data[:256] / 8 - 1, dtype=torch.float32).split(64)
torch.manual_seed(0)
nz, real_label, fake_label = 16, 1.0, 0.0
netG = nn.Sequential(nn.Linear(nz, 32), nn.ReLU(), nn.Linear(32, 64), nn.Tanh())
netD = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
criterion = nn.BCEWithLogitsLoss()

# setup optimizer
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))

optimizerD, optimizerG = polyamp.wrap_optimizer([optimizerD, optimizerG], "O1")

losses = []
for epoch in range(3):
    for real in images:
        ############################
        # (1) Update D network: maximize log(D(x)) + log(1 - D(G(z)))
        ###########################
        # train with real
        netD.zero_grad()
        label = torch.full((len(real), 1), real_label)

        with polyamp.autocast("O1"):
            output = netD(real)
            errD_real = criterion(output, label)
        optimizerD.backward(errD_real)
        D_x = output.mean().item()

        # train with fake
        noise = torch.randn(len(real), nz)
        with polyamp.autocast("O1"):
            fake = netG(noise)
            label.fill_(fake_label)
            output = netD(fake.detach())
            errD_fake = criterion(output, label)
        optimizerD.backward(errD_fake, loss_id=1)
        errD = errD_real + errD_fake
        optimizerD.step()

        ############################
        # (2) Update G network: maximize log(D(G(z)))
        ###########################
        netG.zero_grad()
        label.fill_(real_label)  # fake labels are real for generator cost
        with polyamp.autocast("O1"):
            output = netD(fake)
            errG = criterion(output, label)
        optimizerG.backward(errG, loss_id=2)
        optimizerG.step()
        losses.append(errD.item() + errG.item())
