"""A ResNet in torchvision's style on images of CIFAR's shape, made here. Trains in seconds on a CPU."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import raydist.own as rd

STEPS, BATCH = 12, 16


class BasicBlock(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        """[B, inside, H, W] -> [B, outside, H / stride, W / stride]."""
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.downsample(x))


class ResNet(nn.Module):
    """Of 3 blocks, for 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layers = nn.Sequential(BasicBlock(8, 8, 2), BasicBlock(8, 16, 2), BasicBlock(16, 32, 2))
        self.fc = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, 32, 32] -> [B, 10]."""
        out = self.layers(F.relu(self.bn1(self.conv1(x))))
        return self.fc(out.mean(dim=(2, 3)))


torch.manual_seed(0)
classes = torch.randint(10, (192,))
images = torch.randn(10, 3, 32, 32)[classes] + 0.3 * torch.randn(192, 3, 32, 32)
dataset = TensorDataset(images, classes)
model = ResNet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH, shuffle=True)

with rd.session(model, optimizer, loader, steps=STEPS, scheduler=scheduler, name="resnet") as s:
    for images, classes in s:
        loss = F.cross_entropy(model(images), classes)
        s.backward(loss, weight=len(images))
        s.step()
        print(f"loss {loss.item():.4f}")
