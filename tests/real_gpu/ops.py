"""Runs single ops and writes the sizes of their allocations: ops.py OUT.csv [TEXT...].

With TEXT, only ops whose names contain one of the texts. A line of OUT has the op and the sizes that it
requested from PyTorch's allocator, in order and in bytes; `error: ...` if the op failed. `h200-ops.csv` has
the lines of a real H200.
"""

import csv
import sys
import warnings

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

warnings.simplefilter("ignore")
DEVICE = "cuda"
TYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}
memory = torch.cuda.memory
linalg = torch.linalg


def history(enabled="all"):
    memory._record_memory_history(enabled=enabled, context=None, max_entries=100_000)


def op(name, make, *calls):
    """Calls each of `calls` with the inputs that `make` returns, and with the last call's result."""
    if sys.argv[2:] and not any(text in name for text in sys.argv[2:]):
        return
    try:
        inputs, results = make(), []
        torch.cuda.synchronize()
        before = len(memory._snapshot()["device_traces"][0])
        for call in calls:
            results.append(call(*inputs, *results[-1:]))
        torch.cuda.synchronize()
        events = memory._snapshot()["device_traces"][0][before:]
        lines.writerow([name, " ".join(str(event["size"]) for event in events if event["action"] == "alloc")])
    except RuntimeError as error:
        no_kernel = "No available kernel" in str(error)
        lines.writerow([name, f"error: {'no kernel' if no_kernel else type(error).__name__}"])
    history(None)
    history()


def backward(*inputs_and_output):
    """Runs the backward pass of the last call's result."""
    output = inputs_and_output[-1]
    output.backward(torch.ones_like(output))


def randn(*shape, d="f32", **options):
    return torch.randn(*shape, device=DEVICE, dtype=TYPES[d], **options)


def linear_algebra(d, n, batch):
    shape = (*[4] * batch, n, n)
    eye = torch.eye(n, device=DEVICE, dtype=TYPES[d])
    general = lambda: [randn(*shape, d=d)]
    regular = lambda: [randn(*shape, d=d) * 0.01 + eye * n]

    def positive():
        a = randn(*shape, d=d)
        return [a @ a.mT + n * eye]

    def one(name, make, call):
        op(f"{name}:{d}:{n}:{batch}", make, call)

    one("cholesky", positive, linalg.cholesky)
    one("qr", general, linalg.qr)
    one("inv", regular, linalg.inv)
    one("solve", regular, lambda a: linalg.solve(a, a))
    one("lu", regular, linalg.lu_factor)
    one("det", regular, linalg.det)
    if n > 1024:
        return
    one("eigh", positive, linalg.eigh)
    one("eigvalsh", positive, linalg.eigvalsh)
    one("svd", general, lambda a: linalg.svd(a, full_matrices=False))
    one("svdvals", general, linalg.svdvals)
    one("lstsq", general, lambda a: linalg.lstsq(a, a))
    one("pinv", general, linalg.pinv)
    one("matrix_exp", general, lambda a: linalg.matrix_exp(a / 100))
    one("chol_solve", positive, lambda a: torch.cholesky_solve(a, a))
    one("tri", positive, lambda a: linalg.solve_triangular(a, a, upper=True))
    one("cond", regular, linalg.cond)


def fourier(n, batch):
    pairs = lambda: [torch.randn(batch, n, device=DEVICE, dtype=torch.complex64)]
    tail = f"{n}:{batch}"
    op(f"fft:{tail}", pairs, torch.fft.fft)
    op(f"rfft:{tail}", lambda: [randn(batch, n)], torch.fft.rfft)
    op(f"irfft:{tail}", pairs, torch.fft.irfft)
    op(f"rfft64:{tail}", lambda: [randn(batch, n, d="f64")], torch.fft.rfft)


def fourier_2d(n):
    pairs = lambda: [torch.randn(2, n, n, device=DEVICE, dtype=torch.complex64)]
    op(f"fft2:{n}", pairs, torch.fft.fft2)
    op(f"rfft2:{n}", lambda: [randn(2, n, n)], torch.fft.rfft2)
    op(f"irfft2:{n}", pairs, torch.fft.irfft2)


def recurrent(name, kind, d, inputs, hidden, layers, both, steps, batch):
    model = lambda: kind(inputs, hidden, layers, bidirectional=bool(both)).to(DEVICE, TYPES[d])
    data = lambda **options: randn(steps, batch, inputs, d=d, **options)
    loss = lambda m, x: m(x)[0].float().sum()
    tail = f"{d}:{inputs},{hidden},{layers},{both},{steps},{batch}"
    op(f"{name}:{tail}", lambda: [model(), data(requires_grad=True)], loss, lambda m, x, y: y.backward())
    op(f"{name}-eval:{tail}", lambda: [model().eval(), data()], torch.no_grad()(lambda m, x: m(x)[0]))


def special_recurrent():
    data = lambda: randn(50, 16, 128, requires_grad=True)
    packed = lambda: nn.utils.rnn.pack_padded_sequence(randn(50, 16, 128), torch.arange(50, 34, -1))
    loss, end = (lambda m, x: m(x)[0].sum()), (lambda m, x, y: y.backward())
    op("lstm-proj", lambda: [nn.LSTM(128, 256, 2, proj_size=64).cuda(), data()], loss, end)
    op("lstm-packed", lambda: [nn.LSTM(128, 256, 2).cuda(), packed()], lambda m, x: m(x)[0].data.sum(), end)
    op("lstm-dropout", lambda: [nn.LSTM(128, 256, 2, dropout=0.5).cuda(), data()], loss, end)


# batch, input channels, output channels, height, kernel, stride, groups, dilation, 1 if transposed
CONVOLUTIONS = [
    (32, 64, 64, 56, 1, 1, 1, 1, 0),
    (32, 64, 64, 56, 3, 1, 1, 1, 0),
    (32, 64, 256, 56, 1, 1, 1, 1, 0),
    (32, 256, 128, 56, 1, 2, 1, 1, 0),
    (32, 3, 64, 224, 7, 2, 1, 1, 0),
    (8, 128, 128, 28, 3, 2, 1, 1, 0),
    (16, 512, 512, 7, 3, 1, 1, 1, 0),
    (16, 96, 96, 28, 3, 1, 96, 1, 0),
    (8, 64, 64, 64, 3, 1, 8, 1, 0),
    (4, 64, 128, 32, 3, 1, 1, 2, 0),
    (4, 128, 64, 32, 2, 2, 1, 1, 1),
    (4, 3, 16, 256, 3, 1, 1, 1, 0),
    (2, 320, 320, 64, 3, 1, 1, 1, 0),
]


def convolution(d, last, case):
    n, inputs, outputs, height, kernel, stride, groups, dilation, transposed = case
    form = torch.channels_last if last else torch.contiguous_format
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    options = {"groups": groups, "dilation": dilation}
    if not transposed:
        options["padding"] = dilation * (kernel // 2)
    model = lambda: kind(inputs, outputs, kernel, stride, **options).to(DEVICE, TYPES[d], memory_format=form)
    pixels = lambda: randn(n, inputs, height, height, d=d).to(memory_format=form).requires_grad_()
    tail = ",".join(map(str, case))
    op(f"conv:{d}:{'cl' if last else 'cf'}:{tail}", lambda: [model(), pixels()], lambda m, x: m(x), backward)


def layers(d):
    def layer(name, model, shape, form=torch.contiguous_format, to=None):
        data = lambda: randn(*shape, d=d).to(memory_format=form).requires_grad_()
        op(f"{name}:{d}", lambda: [model().to(DEVICE, to), data()], lambda m, x: m(x), backward)

    kind, norm = TYPES[d], lambda: nn.BatchNorm2d(256)
    layer("conv1d", lambda: nn.Conv1d(80, 512, 3, padding=1), (8, 80, 3000), to=kind)
    layer("conv3d", lambda: nn.Conv3d(32, 64, 3, padding=1), (1, 32, 32, 48, 48), to=kind)
    layer("bn", norm, (32, 256, 28, 28))
    layer("bn-cl", norm, (32, 256, 28, 28), torch.channels_last)
    layer("bn1d", lambda: nn.BatchNorm1d(512), (256, 512))
    layer("ln", lambda: nn.LayerNorm(768), (8, 64, 768), to=kind)
    layer("gn", lambda: nn.GroupNorm(32, 768), (8, 768, 16, 16), to=kind)
    layer("rms", lambda: nn.RMSNorm(768), (8, 64, 768), to=kind)
    layer("in", lambda: nn.InstanceNorm1d(64), (8, 64, 768), to=kind)


def attention(d, width, length, backend, how):
    def call(x, k, v):
        options = {"causal": {"is_causal": True}, "drop": {"dropout_p": 0.1}, "gqa": {"enable_gqa": True}}
        if how == "mask":
            options["mask"] = {"attn_mask": torch.ones(length, length, device=DEVICE, dtype=torch.bool)}
        if backend is None:
            return F.scaled_dot_product_attention(x, k, v, **options.get(how, {}))
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(x, k, v, **options.get(how, {}))

    heads = 2 if how == "gqa" else 8
    make = lambda: [randn(2, h, length, width, d=d, requires_grad=True) for h in (8, heads, heads)]
    op(f"sdpa:{d}:{width}:{length}:{backend.name if backend else 'auto'}:{how}", make, call, backward)


def products(d, m, k, n):
    tail = f"{d}:{m},{k},{n}"
    op(f"mm:{tail}", lambda: [randn(m, k, d=d), randn(k, n, d=d)], torch.mm)
    make = lambda: [nn.Linear(k, n).to(DEVICE, TYPES[d]), randn(m, k, d=d, requires_grad=True)]
    op(f"linear:{tail}", make, lambda layer, x: layer(x), backward)


def batched_products(d):
    op(f"bmm:{d}", lambda: [randn(16, 256, 128, d=d), randn(16, 128, 256, d=d)], torch.bmm)


def reductions(d, n):
    data = lambda: [torch.randn(n, device=DEVICE).to(TYPES[d])]
    calls = {
        "sort": torch.sort,
        "sort-stable": lambda a: a.sort(stable=True),
        "argsort": torch.argsort,
        "topk": lambda a: a.topk(100),
        "median": torch.median,
        "kth": lambda a: a.kthvalue(10),
        "cumsum": lambda a: a.cumsum(0),
        "sum": torch.sum,
        "argmax": torch.argmax,
        "var": torch.var,
        "norm": torch.norm,
        "logsumexp": lambda a: a.logsumexp(0),
    }
    for name, call in calls.items():
        op(f"{name}:{d}:{n}", data, call)
    op(f"histc:{d}:{n}", lambda: [torch.rand(n, device=DEVICE)], lambda a: a.histc(50))
    op(f"quantile:{n}", lambda: [torch.randn(min(n, 1 << 20), device=DEVICE)], lambda a: a.quantile(0.5))


def indexing(n):
    indices = lambda: [torch.arange(n, device=DEVICE) % 997]
    ones, thousand = (lambda: torch.ones(n, device=DEVICE)), (lambda: torch.zeros(1000, device=DEVICE))
    calls = {
        "unique": torch.unique,
        "unique_counts": lambda a: a.unique(return_counts=True, return_inverse=True),
        "uc": torch.unique_consecutive,
        "bincount": torch.bincount,
        "nonzero": lambda a: (a > 500).nonzero(),
        "mask": lambda a: a[a > 500],
        "randperm": lambda a: torch.randperm(n, device=DEVICE),
        "sort-i64": torch.sort,
        "searchsorted": lambda a: torch.searchsorted(a, a),
        "index_put": lambda a: thousand().index_put_((a,), ones(), accumulate=True),
        "scatter_add": lambda a: thousand().scatter_add_(0, a, ones()),
        "index_add": lambda a: thousand().index_add_(0, a, ones()),
        "isin": lambda a: torch.isin(a, a[:10]),
        "repeat_interleave": lambda a: torch.repeat_interleave(a % 3),
    }
    for name, call in calls.items():
        op(f"{name}:{n}", indices, call)
    op(
        f"multinomial:{n}",
        lambda: [torch.rand(n, device=DEVICE)],
        lambda a: a.multinomial(10, replacement=True),
    )
    if n > 100_000:
        return
    tokens = lambda: torch.arange(n, device=DEVICE) % 50304
    table = lambda **options: nn.Embedding(50304, 64, **options).cuda()
    bags = lambda: [nn.EmbeddingBag(50304, 64).cuda(), tokens(), torch.arange(0, n, 10, device=DEVICE)]
    op(f"embedding:{n}", lambda: [table(), tokens()], lambda e, i: e(i), backward)
    op(f"embedding_bag:{n}", bags, lambda e, i, o: e(i, o), backward)
    op(f"embedding-sparse:{n}", lambda: [table(sparse=True), tokens()], lambda e, i: e(i), backward)


def on_images(d):
    calls = {
        "maxpool": lambda x: F.max_pool2d(x, 2),
        "avgpool": lambda x: F.avg_pool2d(x, 2),
        "adaptive": lambda x: F.adaptive_avg_pool2d(x, 7),
        "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        "nearest": lambda x: F.interpolate(x, scale_factor=2),
        "unfold": lambda x: F.unfold(x, 3),
        "softmax": lambda x: x.softmax(-1),
        "logsoftmax": lambda x: x.log_softmax(1),
        "gelu": F.gelu,
        "dropout": lambda x: F.dropout(x, 0.1),
        "pad": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
        "cdist": lambda x: torch.cdist(x.float().flatten(2), x.float().flatten(2)),
        "ce": lambda x: F.cross_entropy(x.flatten(1), torch.zeros(8, dtype=torch.long, device=DEVICE)),
        "einsum": lambda x: torch.einsum("bchw,bdhw->bcd", x, x),
        "std": lambda x: x.std((2, 3)),
        "prod": lambda x: x.prod(-1),
        "cumprod": lambda x: x.cumprod(-1),
        "amax": lambda x: x.amax((2, 3)),
        "flip": lambda x: x.flip(-1),
        "roll": lambda x: x.roll(3, -1),
        "glu": lambda x: F.glu(x, 1),
        "pixel": lambda x: F.pixel_shuffle(x, 2),
        "grid": lambda x: F.grid_sample(x.float(), torch.zeros(8, 32, 32, 2, device=DEVICE)),
    }
    for name, call in calls.items():
        op(f"{name}:{d}", lambda: [randn(8, 16, 64, 64, d=d, requires_grad=True)], call, backward)


def sparse(n):
    dense = lambda: [(torch.arange(n * n, device=DEVICE).reshape(n, n) % 17 == 0).float()]
    columns, ones = (torch.arange(n) * 7) % n, torch.ones(n)
    entries, b = torch.stack([torch.arange(n) % n, columns]), lambda: randn(n, 64)
    coo = lambda: torch.sparse_coo_tensor(entries, ones, (n, n), device=DEVICE)
    csr = lambda: [torch.sparse_csr_tensor(torch.arange(n + 1), columns, ones, (n, n), device=DEVICE), b()]
    op(f"to_csr:{n}", dense, torch.Tensor.to_sparse_csr)
    op(f"to_coo:{n}", dense, torch.Tensor.to_sparse)
    op(f"coo_mm:{n}", lambda: [coo().coalesce(), b()], torch.sparse.mm)
    op(f"coo_add:{n}", lambda: [coo().coalesce(), b()], lambda a, b: a + a)
    op(f"coalesce:{n}", lambda: [coo()], torch.Tensor.coalesce)
    op(f"csr_mm:{n}", csr, lambda a, b: a @ b)
    op(f"csr_mv:{n}", csr, lambda a, b: a @ b[:, 0].contiguous())
    op(f"csr_csr:{n}", csr, lambda a, b: a @ a)


def main():
    for d in ("f32", "f64"):
        for n in (32, 256, 513, 1024, 2048):
            for batch in (0, 1) if n <= 1024 else (0,):
                linear_algebra(d, n, batch)
    for n in (100, 127, 128, 1000, 1024, 4099, 65536, 1 << 20):
        for batch in (1, 16):
            if batch * n <= 1 << 21:
                fourier(n, batch)
    for n in (64, 127, 256, 500, 1024):
        fourier_2d(n)
    stft = lambda a: torch.stft(a, 400, 160, return_complex=True, window=torch.ones(400, device=DEVICE))
    op("stft", lambda: [randn(4, 16000)], stft)
    for name, kind in (("lstm", nn.LSTM), ("gru", nn.GRU), ("rnn", nn.RNN)):
        for d in ("f32", "f16", "bf16"):
            for shape in (
                (64, 128, 1, 0, 50, 16),
                (256, 512, 2, 1, 128, 32),
                (300, 300, 3, 0, 35, 20),
                (128, 256, 2, 0, 100, 64),
                (80, 1024, 1, 1, 200, 8),
                (512, 512, 1, 0, 64, 64),
                (40, 320, 4, 1, 60, 4),
                (32, 32, 1, 0, 7, 3),
            ):
                recurrent(name, kind, d, *shape)
    special_recurrent()
    for d in ("f32", "bf16", "f16"):
        for last in (False, True):
            for case in CONVOLUTIONS:
                convolution(d, last, case)
        layers(d)
    half_only = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
    always = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, None
    for d, backends in (("f32", always), ("bf16", half_only + always)):
        for width in (32, 64, 96, 128, 256):
            for length in (100, 1024):
                for backend in backends:
                    for how in ("causal", "plain", "mask", "drop", "gqa"):
                        attention(d, width, length, backend, how)
    for d in ("f32", "bf16", "f16", "f64"):
        for shape in ((64, 64, 64), (1024, 1024, 1024), (4096, 1024, 4096), (1, 4096, 4096), (8, 50304, 768)):
            products(d, *shape)
        batched_products(d)
    for n in (1000, 5000, 100_000, 1 << 22):
        for d in ("f32", "bf16"):
            reductions(d, n)
        indexing(n)
    letters = lambda: randn(100, 8, 30).log_softmax(2).requires_grad_()
    ctc = lambda a, t: F.ctc_loss(a, t, torch.full((8,), 100), torch.full((8,), 20))
    op("ctc", lambda: [letters(), torch.randint(1, 30, (8, 20), device=DEVICE)], ctc, backward)
    for d in ("f32", "bf16"):
        on_images(d)
    for n in (256, 4096):
        sparse(n)


with open(sys.argv[1], "w", newline="", encoding="utf-8") as file:
    lines = csv.writer(file, lineterminator="\n")
    lines.writerow(["op", "sizes"])
    torch.manual_seed(0)
    torch.ones(8, 8, device=DEVICE) @ torch.ones(8, 8, device=DEVICE)
    torch.cuda.synchronize()
    history()
    main()
