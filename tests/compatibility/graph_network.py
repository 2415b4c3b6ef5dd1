"""PyTorch Geometric: graph convolution and pooling over a batch of graphs."""

import torch
from peaks import print_peak
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GATConv, GCNConv, global_mean_pool


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = GCNConv(32, 128), GATConv(128, 64, heads=2)
        self.head = torch.nn.Linear(128, 4)

    def forward(self, data):
        x = self.first(data.x, data.edge_index).relu()
        return self.head(global_mean_pool(self.second(x, data.edge_index).relu(), data.batch))


torch.manual_seed(0)
graphs = [Data(torch.randn(50, 32), torch.randint(0, 50, (2, 200))) for _ in range(16)]
batch = Batch.from_data_list(graphs).cuda()
model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    out = model(batch)
    out.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step, tuple(out.shape))
print_peak()
