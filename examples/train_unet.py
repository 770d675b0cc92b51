"""A U-Net trained on two processes (DistributedDataParallel over gloo) in bfloat16 autocast, on generated images.

    python examples/train_unet.py            # a few minutes on a CPU without bfloat16 instructions
    python examples/train_unet.py --quick    # tiny images, few steps

Bright discs on noise are to be found. The stock and the converted network start from the same weights and see the same
images; both losses have to fall, and the gradients of the first step have to agree.
"""

import argparse
import copy
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import convselect
from convselect.base.timing import interleaved, ratio


def double_conv(c_in, c_out):
    layers = []
    for c in (c_in, c_out):
        layers += [nn.Conv2d(c, c_out, 3, padding=1, bias=False), nn.BatchNorm2d(c_out), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Three levels; (N, 1, H, W) to logits of the same shape."""

    def __init__(self, width):
        super().__init__()
        self.down1, self.down2 = double_conv(1, width), double_conv(width, 2 * width)
        self.bottom = double_conv(2 * width, 4 * width)
        self.up2, self.out2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), double_conv(4 * width, 2 * width)
        self.up1, self.out1 = nn.ConvTranspose2d(2 * width, width, 2, 2), double_conv(2 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        fine = self.down1(x)
        middle = self.down2(F.max_pool2d(fine, 2))
        coarse = self.bottom(F.max_pool2d(middle, 2))
        middle = self.out2(torch.cat((middle, self.up2(coarse)), 1))
        return self.head(self.out1(torch.cat((fine, self.up1(middle)), 1)))


def images(count, size, seed):
    """Discs on noise (count, 1, size, size), and where they are."""
    generator = torch.Generator().manual_seed(seed)
    centre = size * (0.25 + 0.5 * torch.rand(count, 2, 1, 1, generator=generator))
    radius = size * (0.1 + 0.15 * torch.rand(count, 1, 1, generator=generator))
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    inside = (rows - centre[:, 0]) ** 2 + (columns - centre[:, 1]) ** 2 < radius**2
    mask = inside.float().unsqueeze(1)
    return mask + 0.5 * torch.randn(mask.shape, generator=generator), mask


def step(model, optimiser, x, mask):
    """One training step; the loss."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x)
    loss = F.binary_cross_entropy_with_logits(logits.float(), mask)
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    return loss.detach()


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def train(rank, world, rendezvous, width, size, batch, steps, rounds):
    torch.set_num_threads(max(1, torch.get_num_threads() // world))
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    convselect.distributed.same_choices()  # before training: all ranks choose by rank 0's model
    torch.manual_seed(0)
    stock = UNet(width)
    converted = convselect.convert(copy.deepcopy(stock))
    x, mask = images(batch, size, seed=rank)
    if rank == 0:
        with torch.autocast("cpu", torch.bfloat16):
            explanation = convselect.explain(converted, x)
        for direction, told in explanation.summary().items():
            print(f"{direction}: {', '.join(f'{n} {name}' for name, n in told['algorithms'].items())}")

    models = {name: DistributedDataParallel(m) for name, m in (("stock", stock), ("converted", converted))}
    optimisers = {name: torch.optim.Adam(model.parameters(), 1e-2) for name, model in models.items()}
    losses = {name: [] for name in models}
    for i in range(steps):
        x, mask = images(batch, size, seed=world * i + rank)
        for name, model in models.items():
            loss = step(model, optimisers[name], x, mask)
            dist.all_reduce(loss)
            losses[name].append(float(loss) / world)
        if i == 0:
            want, got = gradients(models["stock"]), gradients(models["converted"])
            error = float((got - want).norm() / want.norm())

    # Every rank draws the same orders, so that their collectives meet.
    timings = interleaved(
        {name: lambda name=name: step(models[name], optimisers[name], x, mask) for name in models}, rounds
    )
    if rank == 0:
        print(f"gradients of the first step: {error:.0e} from stock PyTorch's (bfloat16 has 3 digits)")
        for name, values in losses.items():
            print(f"{name}: loss {values[0]:.3f} at first, {values[-1]:.3f} after {steps} steps")
        whole = ratio(timings["stock"], timings["converted"])
        print(
            f"a step: {timings['stock'].median_us / 1e3:.1f} ms stock, {timings['converted'].median_us / 1e3:.1f} ms "
            f"converted, {whole.median:.2f} times faster (p20 {whole.p20:.2f}, p80 {whole.p80:.2f})"
        )
    assert error < 0.03
    assert all(values[-1] < 0.8 * values[0] for values in losses.values()), losses
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny images and few steps, for a test")
    args = parser.parse_args()
    # width, image size, images per process, steps, rounds of timing
    sizes = (8, 32, 2, 12, 2) if args.quick else (32, 96, 4, 30, 10)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (2, Path(folder) / "rendezvous", *sizes), nprocs=2)


if __name__ == "__main__":
    main()
