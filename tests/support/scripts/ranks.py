"""Train on the ranks that ``torchrun`` started."""

import digits
import torch

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
model = torch.nn.parallel.DistributedDataParallel(digits.model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for x, y in digits.batches(4):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x[rank::2]), y[rank::2])
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
if rank == 0:
    digits.save(losses)
torch.distributed.destroy_process_group()
