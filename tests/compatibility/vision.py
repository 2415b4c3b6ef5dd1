"""Trains vision models: vision.py timm:MODEL | detection | deeplab | smp."""

import sys
import warnings

import torch
from peaks import print_peak

warnings.simplefilter("ignore")


def timm_model(name):
    import timm

    model = timm.create_model(name, num_classes=10).cuda()
    return model, lambda: model(torch.randn(4, 3, 224, 224, device="cuda")).square().mean()


def detection():
    from torchvision.models.detection import fasterrcnn_resnet50_fpn

    model = fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=5).cuda()
    boxes = torch.tensor([[10.0, 10.0, 90.0, 90.0], [40.0, 40.0, 200.0, 160.0]], device="cuda")
    target = {"boxes": boxes, "labels": torch.tensor([1, 2], device="cuda")}
    return model, lambda: sum(model([torch.rand(3, 256, 256, device="cuda")] * 2, [target] * 2).values())


def deeplab():
    from torchvision.models.segmentation import deeplabv3_resnet50

    model = deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=5).cuda()
    return model, lambda: model(torch.rand(2, 3, 256, 256, device="cuda"))["out"].square().mean()


def smp():
    import segmentation_models_pytorch as smp

    model = smp.Unet("resnet34", encoder_weights=None, classes=5).cuda()
    loss = smp.losses.DiceLoss("multiclass")
    masks = torch.zeros(2, 128, 128, dtype=torch.long, device="cuda")
    return model, lambda: loss(model(torch.rand(2, 3, 128, 128, device="cuda")), masks)


torch.manual_seed(0)
what, _, name = sys.argv[1].partition(":")
model, loss_of = timm_model(name) if what == "timm" else globals()[what]()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for _ in range(3):
    loss_of().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained")
print_peak()
