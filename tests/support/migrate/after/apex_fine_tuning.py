"""The fine-tuning script that many copied: a level by option, a late import, accumulation, clipping, checkpoints."""
import argparse
import logging

import torch
from sklearn.datasets import load_digits
import polyamp

logger = logging.getLogger(__name__)


def train(args, train_dataset, model):
    """ Train the model """
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 20))
    if args.fp16:
        if args.fp16_opt_level in ("O2", "O3"):
            model = polyamp.convert(model, args.fp16_opt_level)
        optimizer = polyamp.wrap_optimizer(optimizer, args.fp16_opt_level)

    losses = []
    model.zero_grad()
    for _ in range(4):
        for step, batch in enumerate(train_dataset):
            model.train()
            batch = tuple(t.to(args.device) for t in batch)
            inputs = {'input': batch[0]}
            with polyamp.autocast(args.fp16_opt_level if args.fp16 else "float32"):
                outputs = (model(**inputs),)
                loss = torch.nn.functional.cross_entropy(outputs[0], batch[1])  # model outputs are always tuple

                if args.n_gpu > 1:
                    loss = loss.mean()  # mean() to average on multi-gpu parallel training
                if args.gradient_accumulation_steps > 1:
                    loss = loss / args.gradient_accumulation_steps

            if args.fp16:
                optimizer.backward(loss)
            else:
                loss.backward()

            losses.append(loss.item())
            if (step + 1) % args.gradient_accumulation_steps == 0:
                if args.fp16:
                    optimizer.clip_grad_norm_(args.max_grad_norm)
                else:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)

                optimizer.step()
                scheduler.step()  # Update learning rate schedule
                model.zero_grad()
    if args.fp16:
        saved = polyamp.save_loss_scale(optimizer)
        polyamp.load_loss_scale(optimizer, saved)
    return losses


parser = argparse.ArgumentParser()
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--fp16_opt_level", type=str, default="O1")
args = parser.parse_args()
args.learning_rate, args.n_gpu, args.gradient_accumulation_steps, args.max_grad_norm = 1e-2, 0, 2, 1.0
args.device = "cpu"
digits = load_digits()
images = torch.tensor(digits.data[:256] / 16, dtype=torch.float32).split(32)
labels = torch.tensor(digits.target[:256]).split(32)
torch.manual_seed(0)
losses = train(args, list(zip(images, labels)), torch.nn.Linear(64, 10))
