"""Train in two spawned processes with DistributedDataParallel."""

import sys

import digits
import torch


def train(rank, file):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    model = digits.model()
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(*digits.batches(1, 128)[0])
    loader = torch.utils.data.DataLoader(data, 32)
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        with parallel.no_sync():
            torch.nn.functional.cross_entropy(parallel(x[rank::2]), y[rank::2]).backward()
        loss = torch.nn.functional.cross_entropy(parallel(x[rank::2]), y[rank::2])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if rank == 0:
        digits.save(losses)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(train, (sys.argv[1] + ".store",), nprocs=2)
