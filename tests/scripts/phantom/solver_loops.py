"""Runs each solver more often than a program can read unknown flags before one reads true. The status codes
of the solvers are known, so they stay 0. PyTorch raises an error for any other code."""

import torch

LOOPS = 4200  # MAX_IDLE_FLAGS in src/phantom/device/core/loop_guard.rs is 4096
torch.manual_seed(0)
a, b = torch.randn(3, 3, device="cuda"), torch.randn(3, 2, device="cuda")
many, right = torch.randn(4, 3, 3, device="cuda"), torch.randn(4, 3, 2, device="cuda")
SOLVERS = {
    "solve": lambda: torch.linalg.solve(a, b),
    "solve of many": lambda: torch.linalg.solve(many, right),
    "cholesky": lambda: torch.linalg.cholesky(a),
    "lu": lambda: torch.linalg.lu_factor(a),
    "eigh": lambda: torch.linalg.eigh(a),
    "inv of many": lambda: torch.linalg.inv(many),
}
for name, solve in SOLVERS.items():
    for _ in range(LOOPS):
        solve()
    print(name)
# Values that the program wrote stay known, because a solver writes its codes to another block.
codes = torch.ones(5, dtype=torch.int32, device="cuda")
torch.linalg.solve(a, b)
assert codes.any().item() and codes[:1].any().item() and codes.tolist() == [1] * 5
assert not torch.zeros(1, dtype=torch.int64, device="cuda").any().item()
assert torch.tensor([256], device="cuda").any().item()
