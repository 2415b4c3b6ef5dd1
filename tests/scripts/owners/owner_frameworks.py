"""Checks owners under popular training frameworks, in the way of `owner_cases.py`.

owner_frameworks.py CASE...                  each in a forked child
owner_frameworks.py alone CASE               in this process, for `torchrun` and `accelerate launch`
owner_frameworks.py notebook                 in the kernel of a notebook
owner_frameworks.py fork|spawn|forkserver    in a child of `multiprocessing`
"""

import gc
import os
import sys
import warnings

import owner_cases
import torch
from owner_cases import Outer, Takes, expect, x
from torch import nn

warnings.simplefilter("ignore")


def one_rank():
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(20000 + os.getpid() % 20000), RANK="0", WORLD_SIZE="1"
    )
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl")


def train(model, features, steps=2):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for _ in range(steps):
        model(x(4, features)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel

    one_rank()
    model = Outer(311, Takes(312, 160)).cuda()
    model.inner[0] = FullyShardedDataParallel(model.inner[0], use_orig_params=True)
    train(FullyShardedDataParallel(model, use_orig_params=True), 160)
    expect(311, module="Outer", phase="forward")
    expect(312, module="Outer.inner.0", phase="forward")
    torch.distributed.destroy_process_group()
    print("trained")


def peft():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(Outer(321, Takes(322, 160)), LoraConfig(r=16, target_modules=["linear"])).cuda()
    train(model, 160)
    base = "PeftModel.base_model.model" if os.environ.get("MEMTRACE_WRAPPERS") == "1" else "Outer"
    expect(321, module=base, phase="forward")
    expect(322, module=f"{base}.inner.0", phase="forward")
    linear = f"{base}.inner.0.linear"
    expect(200, module=f"{linear}.base_layer", category="parameter", some=True)
    expect(20, module=f"{linear}.lora_A.default", category="parameter", some=True)
    expect(20, module=f"{linear}.lora_A.default", category="optimizer_state", some=True)
    print(sorted(name for name, p in model.named_parameters() if p.requires_grad))


def lightning():
    import logging

    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Outer(331, Takes(332, 160))

        def training_step(self, batch, _):
            return self.net(batch).sum()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    trainer = lightning.Trainer(
        max_steps=3,
        accelerator="gpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Lit(), torch.utils.data.DataLoader(torch.ones(12, 160), batch_size=4))
    expect(331, module="Lit.net", phase="forward")
    expect(332, module="Lit.net.inner.0", phase="forward")
    expect(200, module="Lit.net.inner.0.linear", category="parameter", some=True)
    expect(200, module="Lit.net.inner.0.linear", category="gradient", some=True)
    expect(200, module="Lit.net.inner.0.linear", category="optimizer_state", some=True)
    print("steps", trainer.global_step)


def fabric():
    import lightning

    fabric = lightning.Fabric(accelerator="gpu", devices=1)
    net = Outer(334, Takes(335, 160))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    for _ in range(2):
        fabric.backward(model(x(4, 160)).sum())
        optimizer.step()
        optimizer.zero_grad()
    expect(334, module="Outer", phase="forward")
    expect(335, module="Outer.inner.0", phase="forward")
    expect(200, module="Outer.inner.0.linear", category="optimizer_state", some=True)


def accelerated():
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16")
    model = Outer(341, Takes(342, 160))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        accelerator.backward(model(x(4, 160)).sum())
        optimizer.step()
        optimizer.zero_grad()
    expect(341, module="Outer", phase="forward")
    expect(342, module="Outer.inner.0", phase="forward")
    expect(200, module="Outer.inner.0.linear", category="parameter", some=True)
    expect(200, module="Outer.inner.0.linear", category="optimizer_state", some=True)
    print(accelerator.state.distributed_type, accelerator.mixed_precision)


class Halves(Outer):
    """The layers that FSDP shards over two ranks."""


class Flat(Outer):
    """The layers that FSDP1 shards over two ranks."""


class FlatHalf(Outer):
    """The layers that FSDP1 gathers in bfloat16, and whose gradients it reduces in float32."""


def flat_parameters(kind, width, precision, sizes):
    """FSDP1 gathers into its flat parameter, and reduces the gradient of that parameter. `sizes` has, for
    each layer, the size of the float32 parameters and of a rank's part."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = kind(356, Takes(357, width), nn.Linear(width, width + 16)).cuda()
    options = {"use_orig_params": True, "mixed_precision": precision}
    for index in (0, 1):
        model.inner[index] = FullyShardedDataParallel(model.inner[index], **options)
    train(FullyShardedDataParallel(model, **options), width)
    for index, inner in ((0, ".linear"), (1, "")):
        (whole, part), module = sizes[index], f"{kind.__name__}.inner.{index}"
        gathered = whole if precision is None else part
        for phase in ("forward", "backward"):
            expect(gathered, module=module, category="unsharded_param", phase=phase, some=True)
        expect(gathered, module=module, category="unsharded_grad", phase="backward", some=True)
        expect(part, module=module + inner, category="gradient", phase="backward", some=True)
        if precision is not None:
            expect(whole, module=module, category="reduce_scatter", phase="backward", some=True)


def ranks():
    """Runs a rank that `torchrun` started."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    model = nn.parallel.DistributedDataParallel(Outer(351, Takes(352, 160)).cuda())
    train(model, 160)
    expect(351, module="Outer", phase="forward")
    expect(352, module="Outer.inner.0", phase="forward")
    expect(200, module="Outer.inner.0.linear", category="parameter", some=True)
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        from torch.distributed._composable.fsdp import fully_shard
    model = Halves(353, Takes(354, 192), Takes(355, 192)).cuda()
    for part in (*model.inner, model):
        fully_shard(part)
    train(model, 192)
    for index in (0, 1):
        expect(144, module=f"Halves.inner.{index}.linear", category="parameter", some=True)
        for phase in ("forward", "backward"):
            expect(288, module=f"Halves.inner.{index}", category="unsharded_param", phase=phase, some=True)
        linear = f"Halves.inner.{index}.linear"
        expect(288, module=linear, category="unsharded_grad", phase="backward", some=True)
        expect(290, module=f"Halves.inner.{index}", category="all_gather", phase="forward", some=True)
        expect(290, module=f"Halves.inner.{index}", category="reduce_scatter", phase="backward", some=True)
    # The next call finds one layer frozen. The test compares the bytes of the other with the trace.
    model.inner[0].requires_grad_(False)
    model(x(4, 192))
    flat_parameters(Flat, 208, None, [(340, 170), (366, 183)])
    from torch.distributed.fsdp import MixedPrecision

    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    flat_parameters(FlatHalf, 240, precision, [(452, 226), (482, 241)])
    torch.distributed.destroy_process_group()


def cell():
    model = Outer(361, Takes(362, 160)).cuda()
    train(model, 160)
    expect(361, module="Outer", phase="forward")
    expect(362, module="Outer.inner.0", phase="forward", callers=["block", "forward", "forward"])
    print("a cell ran")


def notebook():
    """Runs two cells in a kernel of this Python."""
    import nbformat
    from jupyter_client.manager import KernelManager
    from nbclient import NotebookClient

    cells = [
        f"import sys; sys.path.insert(0, {os.path.dirname(os.path.abspath(__file__))!r})",
        "import owner_frameworks; owner_frameworks.run('cell')",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    manager = KernelManager()
    manager.kernel_cmd = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    NotebookClient(book, km=manager, timeout=300).execute()
    for cell in book.cells:
        for output in cell.outputs:
            print(output.get("text", output))


def run(case):
    owner_cases.expected.clear()
    globals()[case]()
    owner_cases.write(case)


def in_child():
    run("cell")


if __name__ == "__main__":
    how = sys.argv[1]
    if how == "alone":
        run(sys.argv[2])
    elif how == "notebook":
        notebook()
    elif how in ("fork", "spawn", "forkserver"):
        import multiprocessing

        child = multiprocessing.get_context(how).Process(target=in_child)
        child.start()
        child.join()
        sys.exit(child.exitcode)
    else:
        import torch._dynamo  # once, not in every child: the first step of an optimizer imports it

        gc.freeze()  # see forked.py
        for case in sys.argv[1:]:
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                print("==", case)
                run(case)
                sys.stdout.flush()
                # Without this exit the child would go on with the next case.
                sys.exit(0)
            status = os.waitpid(child, 0)[1]
            if status:
                print(f"{case}: status {status}")
