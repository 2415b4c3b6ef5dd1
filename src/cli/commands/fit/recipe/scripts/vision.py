"""TITLE

python train.py --data folder   trains MODEL on images in a folder for each class (needs torchvision), then
                                writes the weights to trained.pt
python train.py --random        the same with random weights and images: writes nothing
"""

import argparse
import itertools
import pydoc

import timm
import torch

MODEL = "a name from timm.list_models()"
BATCH = 1
SIZE = 224
CLASSES = 1000
OPTIMIZER = "torch.optim.AdamW"
LEARNING_RATE = 0.0001
CHECKPOINTING = False
ACCUMULATION = 1
DTYPE = "float32"
AUTOCAST = True
CHANNELS_LAST = True

parser = argparse.ArgumentParser()
parser.add_argument("--model", default=MODEL)
parser.add_argument("--batch", type=int, default=BATCH)
parser.add_argument("--size", type=int, default=SIZE, help="width and height of an image in pixels")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--data", help="a folder")
parser.add_argument("--random", action="store_true")
args = parser.parse_args()
if bool(args.data) == args.random:
    parser.error("give either --data FOLDER or --random")

device = "cuda" if torch.cuda.is_available() else "cpu"
# Some models can only take images of the size that they are built for.
fixed = {"img_size": args.size} if timm.get_pretrained_cfg(args.model).fixed_input_size else {}
if args.data:
    dataset = timm.data.create_dataset("", root=args.data, is_training=True)
    if (count := len(dataset.reader.class_to_idx)) != CLASSES:
        raise SystemExit(f"--data has a folder for each of {count} classes: set CLASSES = {count}")
with torch.device(device):
    model = timm.create_model(args.model, pretrained=not args.random, num_classes=CLASSES, **fixed)
layout = torch.channels_last if CHANNELS_LAST else torch.contiguous_format
model = model.to(device, getattr(torch, DTYPE), memory_format=layout).train()
model.set_grad_checkpointing(CHECKPOINTING)
optimizer = pydoc.locate(OPTIMIZER)(model.parameters(), lr=LEARNING_RATE)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

if args.data:
    own = timm.data.resolve_data_config({"input_size": (3, args.size, args.size)}, model=model)
    dataset.transform = timm.data.create_transform(**own, is_training=True)
    workers = {"num_workers": 4, "multiprocessing_context": "fork"}
    batches = torch.utils.data.DataLoader(dataset, args.batch, shuffle=True, drop_last=True, **workers)
    if not len(batches):
        raise SystemExit(f"--data has {len(dataset)} images, fewer than a batch")
else:
    images = torch.randn(args.batch, 3, args.size, args.size)
    batches = [(images, torch.randint(CLASSES, (args.batch,)))]
rounds = itertools.chain.from_iterable(itertools.repeat(batches))
for step, (images, classes) in enumerate(itertools.islice(rounds, args.steps)):
    images = images.to(device, getattr(torch, DTYPE), memory_format=layout)
    total = 0
    for part, labels in zip(images.chunk(ACCUMULATION), classes.to(device).chunk(ACCUMULATION)):
        with torch.autocast(device, torch.bfloat16, enabled=AUTOCAST):
            loss = torch.nn.functional.cross_entropy(model(part), labels)
        (loss * len(part) / len(images)).backward()
        total += loss.detach() * len(part) / len(images)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    print(f"step {step}: loss {total.item():.3f}", flush=True)
if not args.random:
    torch.save(model.state_dict(), "trained.pt")
