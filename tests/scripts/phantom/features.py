"""Features of PyTorch on a CUDA device, one function each; all run on the simulated GPU.

    features.py [NAME...]

A function fails by an exception; its return value is printed. None may hang, crash or take long.
"""

import gc
import math
import sys
import time
import traceback

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

D = "cuda"
FEATURES = []


def feature(function):
    FEATURES.append(function)
    return function


def train(model, make_input, steps=2, optimizer=torch.optim.AdamW, **options):
    optimizer = optimizer(model.parameters(), **options)
    for _ in range(steps):
        loss = model(make_input()).float().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss


@feature
def matrix_products():
    a, b = torch.randn(64, 32, device=D), torch.randn(32, 48, device=D)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64):
        x, y = a.to(dtype), b.to(dtype)
        assert (x @ y).shape == (64, 48) and torch.bmm(x[None], y[None]).shape == (1, 64, 48)
        assert torch.addmm(x @ y, x, y).shape == (64, 48) and torch.mv(x, y[:, 0]).shape == (64,)
        assert (
            torch.baddbmm((x @ y)[None], x[None], y[None]).shape == (1, 64, 48)
            and torch.dot(x[0], x[1]).shape == ()
        )
    assert (
        torch._int_mm(
            torch.zeros(32, 32, dtype=torch.int8, device=D), torch.zeros(32, 32, dtype=torch.int8, device=D)
        ).dtype
        == torch.int32
    )
    assert F.linear(a, b.t(), torch.zeros(48, device=D)).shape == (64, 48)


@feature
def fp8_scaled_products():
    a = torch.randn(64, 64, device=D).to(torch.float8_e4m3fn)
    one = torch.ones((), device=D)
    assert torch._scaled_mm(a, a.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16).shape == (64, 64)


@feature
def attention_of_every_kind():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    peaks = {}
    for backend in (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
        SDPBackend.CUDNN_ATTENTION,
    ):
        q, k, v = (
            torch.randn(2, 8, 512, 64, device=D, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )
        torch.cuda.reset_peak_memory_stats()
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
        assert q.grad.shape == q.shape
        peaks[backend.name] = torch.cuda.max_memory_allocated()
    scores = 2 * 8 * 512 * 512 * 2
    assert peaks["MATH"] > peaks["FLASH_ATTENTION"] + scores, peaks
    mask = torch.zeros(512, 512, device=D, dtype=torch.bfloat16)
    F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.1).sum().backward()
    return peaks


@feature
def transformer_encoder():
    layer = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True)
    model = nn.TransformerEncoder(layer, 3).cuda()
    train(model, lambda: torch.randn(4, 128, 256, device=D))
    model.eval()
    with torch.no_grad():  # the fast path
        assert model(torch.randn(4, 128, 256, device=D)).shape == (4, 128, 256)
        padded = torch.zeros(4, 128, dtype=torch.bool, device=D)
        padded[:, 100:] = True
        assert model(torch.randn(4, 128, 256, device=D), src_key_padding_mask=padded).shape[0] == 4


@feature
def autocast_and_grad_scaler():
    for dtype in (torch.float16, torch.bfloat16):
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
        for _ in range(3):
            with torch.autocast("cuda", dtype):
                out = model(torch.randn(8, 64, device=D))
                assert out.dtype == dtype
                loss = out.float().sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            assert math.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() >= 0


@feature
def optimizers_of_every_kind():
    for optimizer, options in (
        (torch.optim.AdamW, {"foreach": True}), (torch.optim.AdamW, {"foreach": False}), (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adam, {"amsgrad": True, "fused": True}), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.SGD, {"lr": 0.1, "fused": True}), (torch.optim.Adagrad, {}), (torch.optim.RMSprop, {}), (torch.optim.NAdam, {}),
        (torch.optim.AdamW, {"capturable": True}), (torch.optim.Adafactor, {}),
    ):  # fmt: skip
        train(nn.Linear(32, 32).cuda(), lambda: torch.randn(4, 32, device=D), optimizer=optimizer, **options)


@feature
def activation_checkpointing_of_both_kinds():
    peaks = {}
    for kind in ("none", "reentrant", "not reentrant"):
        layers = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(8)
        ).cuda()
        x = torch.randn(8192, 256, device=D, requires_grad=True)
        torch.cuda.reset_peak_memory_stats()
        y = x
        for layer in layers:
            y = layer(y) if kind == "none" else checkpoint(layer, y, use_reentrant=kind == "reentrant")
        y.sum().backward()
        peaks[kind] = torch.cuda.max_memory_allocated()
        del layers, x, y
    assert peaks["reentrant"] < 0.6 * peaks["none"] and peaks["not reentrant"] < 0.6 * peaks["none"], peaks
    return peaks


@feature
def gradient_accumulation():
    model = nn.Linear(512, 512).cuda()
    model(torch.randn(4, 512, device=D)).sum().backward()
    first = torch.cuda.memory_allocated()
    for _ in range(3):
        model(torch.randn(4, 512, device=D)).sum().backward()
    assert torch.cuda.memory_allocated() == first


@feature
def recurrent_networks():
    for module, options in (
        (nn.LSTM, {"num_layers": 2, "dropout": 0.1, "batch_first": True}), (nn.LSTM, {"proj_size": 16}),
        (nn.GRU, {"num_layers": 2, "bidirectional": True}), (nn.RNN, {"bias": False}), (nn.LSTM, {"bidirectional": True}),
    ):  # fmt: skip
        model = module(64, 32, **options).cuda()
        x = torch.randn(5, 7, 64, device=D, requires_grad=True)
        out, _ = model(x)
        width = options.get("proj_size", 32) * (2 if options.get("bidirectional") else 1)
        assert out.shape == (5, 7, width)
        out.sum().backward()
        assert x.grad.shape == x.shape
        model.flatten_parameters()
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 3, 64, device=D), torch.tensor([5, 3, 2]))
    nn.LSTM(64, 32).cuda()(packed)
    nn.LSTMCell(8, 8).cuda()(torch.randn(2, 8, device=D))


@feature
def embeddings_and_losses():
    table = nn.Embedding(1000, 64, sparse=True).cuda()
    table(torch.randint(0, 1000, (4, 16), device=D)).sum().backward()
    bag = nn.EmbeddingBag(1000, 64).cuda()
    bag(torch.randint(0, 1000, (100,), device=D), torch.arange(0, 100, 10, device=D)).sum().backward()
    logits = torch.randn(8, 10, device=D, requires_grad=True)
    labels = torch.randint(0, 10, (8,), device=D)
    probabilities = torch.sigmoid(torch.randn(8, 10, device=D))
    for loss in (
        F.cross_entropy(logits, labels, label_smoothing=0.1), F.nll_loss(F.log_softmax(logits, 1), labels), F.mse_loss(logits, probabilities),
        F.binary_cross_entropy_with_logits(logits, probabilities), F.smooth_l1_loss(logits, probabilities), F.kl_div(logits, probabilities),
        F.multi_margin_loss(logits, labels), F.cosine_embedding_loss(logits, probabilities, torch.ones(8, device=D)),
    ):  # fmt: skip
        loss.backward(retain_graph=True)
    ctc = nn.CTCLoss()(
        torch.randn(50, 4, 20, device=D).log_softmax(2),
        torch.ones(4, 10, dtype=torch.long),
        torch.full((4,), 50),
        torch.full((4,), 10),
    )
    assert ctc.shape == ()


@feature
def norms_dropout_and_pooling():
    x = torch.randn(4, 16, 32, 32, device=D, requires_grad=True)
    for module in (
        nn.BatchNorm2d(16), nn.GroupNorm(4, 16), nn.InstanceNorm2d(16), nn.LayerNorm([16, 32, 32]), nn.LocalResponseNorm(2), nn.Dropout(0.5),
        nn.Dropout2d(0.5), nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveMaxPool2d(4), nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.PixelShuffle(2), nn.SyncBatchNorm(16), nn.PReLU(), nn.RMSNorm(32),
    ):  # fmt: skip
        module.cuda()(x).sum().backward()
    F.grid_sample(x, torch.zeros(4, 8, 8, 2, device=D)).sum().backward()
    F.interpolate(x, size=(7, 9), mode="bicubic").sum().backward()


@feature
def sorting_indexing_and_random_numbers():
    x = torch.randn(100, 100, device=D)
    i = torch.randint(0, 100, (100, 100), device=D)
    (
        x.sort(),
        x.argsort(),
        x.topk(5),
        x.kthvalue(3),
        x.median(),
        x.mode(),
        x.cumsum(0),
        x.cumprod(1),
        x.logcumsumexp(0),
    )
    (
        x.gather(0, i),
        x.scatter(0, i, x),
        x.scatter_add(0, i, x),
        x.index_select(0, i[0]),
        x.take(i),
        x[i[0]],
        x.flip(0),
        x.roll(1),
    )
    (
        x.index_add_(0, i[0], x.clone()),
        x.index_put_((i[0], i[1]), x[0].clone(), accumulate=True),
        x.masked_fill_(x > 0, 0.0),
    )
    (
        torch.histc(x, 10),
        torch.bincount(i.flatten(), minlength=100),
        torch.searchsorted(x[0], x[1]),
        torch.bucketize(x, x[0]),
    )
    (
        torch.multinomial(torch.softmax(x, 1), 3),
        torch.bernoulli(x.sigmoid()),
        torch.randperm(100, device=D),
        torch.normal(x, x.abs()),
    )
    (
        torch.poisson(x.abs()),
        torch.empty_like(x).exponential_(),
        torch.distributions.Gamma(x.abs() + 1, x.abs() + 1).sample(),
    )
    (
        torch.einsum("ij,jk->ik", x, x),
        torch.cdist(x, x),
        torch.tril_indices(5, 5, device=D),
        torch.cartesian_prod(x[0], x[1]),
    )
    (
        torch.special.bessel_j0(x[0]),
        torch.gcd(i, i),
        torch.kron(x[:2, :2], x[:2, :2]),
        x.unfold(0, 5, 2),
        torch.stack([x, x]),
        torch.cat([x, x]),
    )
    generator = torch.Generator(D).manual_seed(3)
    state = generator.get_state()
    torch.randn(3, device=D, generator=generator)
    generator.set_state(state)
    torch.cuda.set_rng_state(torch.cuda.get_rng_state())
    assert torch.cuda.initial_seed() >= 0


@feature
def fft():
    x = torch.randn(8, 60, 64, device=D)
    assert torch.fft.rfft2(x).shape == (8, 60, 33) and torch.fft.irfft(torch.fft.rfft(x)).shape == x.shape
    assert torch.fft.fftn(x).shape == x.shape and torch.fft.fft(x.double()).dtype == torch.complex128
    assert (
        torch.stft(
            torch.randn(4000, device=D), 400, return_complex=True, window=torch.ones(400, device=D)
        ).shape[0]
        == 201
    )


@feature
def linear_algebra():
    a = torch.randn(3, 32, 32, device=D)
    symmetric = a @ a.mT
    (
        torch.linalg.qr(a),
        torch.linalg.svd(a),
        torch.linalg.svdvals(a),
        torch.linalg.cholesky(symmetric),
        torch.linalg.eigh(symmetric),
    )
    (
        torch.linalg.solve(a, a),
        torch.linalg.inv(a),
        torch.linalg.det(a),
        torch.linalg.lstsq(a, a),
        torch.linalg.lu(a),
        torch.linalg.eigvalsh(symmetric),
    )
    (
        torch.linalg.solve_triangular(a, a, upper=True),
        torch.cholesky_solve(a, symmetric),
        torch.linalg.matrix_norm(a),
        torch.linalg.pinv(a),
    )
    (
        torch.linalg.matrix_exp(a),
        torch.linalg.ldl_factor(symmetric),
        torch.linalg.householder_product(a, a[:, :, 0]),
    )


@feature
def sparse_tensors():
    dense = torch.randn(100, 100, device=D)
    coo = torch.sparse_coo_tensor(torch.arange(50).repeat(2, 1), torch.ones(50), (100, 100)).cuda()
    assert torch.sparse.mm(coo, dense).shape == (100, 100)
    csr = torch.sparse_csr_tensor(torch.arange(101), torch.arange(100), torch.ones(100), (100, 100)).cuda()
    assert (csr @ dense).shape == (100, 100) and (csr @ dense[0]).shape == (100,)
    dense.to_sparse(), (coo + coo).coalesce(), coo.to_dense(), dense.to_sparse_csr()


@feature
def pinned_loader_with_workers():
    data = torch.utils.data.TensorDataset(torch.randn(64, 1000), torch.arange(64))
    loader = torch.utils.data.DataLoader(
        data, batch_size=8, pin_memory=True, num_workers=2, persistent_workers=True
    )
    for _ in range(2):
        seen = []
        for x, y in loader:
            assert x.is_pinned()
            x, y = x.to(D, non_blocking=True), y.to(D, non_blocking=True)
            seen += y.tolist()
        assert seen == list(range(64)), seen
    del loader


@feature
def streams_and_events():
    side = torch.cuda.Stream(priority=-1)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.default_stream())
        a = torch.randn(100, 100, device=D)
        a.record_stream(torch.cuda.default_stream())
        b = a @ a
    torch.cuda.current_stream().wait_stream(side)
    end.record()
    torch.cuda.synchronize()
    assert 0 < start.elapsed_time(end) < 1000 and b.shape == (100, 100)


@feature
def cuda_graphs():
    layer = nn.Linear(256, 256).cuda()
    x = torch.zeros(64, 256, device=D)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            layer(x).relu().sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    layer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph, pool=pool):
        out = layer(x).relu()
        out.sum().backward()
    for _ in range(3):
        x.copy_(torch.ones(64, 256))
        graph.replay()
    assert not torch.cuda.is_current_stream_capturing()
    pools = {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()}
    assert len(pools) >= 2, pools
    second = torch.cuda.CUDAGraph()
    with torch.cuda.graph(second, pool=pool):
        layer(out)
    second.replay()
    del graph, second
    graphed = torch.cuda.make_graphed_callables(
        nn.Sequential(nn.Linear(32, 32), nn.ReLU()).cuda(),
        (torch.randn(8, 32, device=D, requires_grad=True),),
    )
    graphed(torch.randn(8, 32, device=D, requires_grad=True)).sum().backward()


@feature
def memory_history_and_snapshot():
    import pickle
    import tempfile

    torch.cuda.memory._record_memory_history(max_entries=10000)
    a = torch.empty(1 << 20, device=D)
    b = a * 2
    del a
    with tempfile.TemporaryDirectory() as folder:
        torch.cuda.memory._dump_snapshot(f"{folder}/snapshot.pickle")
        with open(f"{folder}/snapshot.pickle", "rb") as file:
            snapshot = pickle.load(file)
    torch.cuda.memory._record_memory_history(enabled=None)
    actions = [entry["action"] for entry in snapshot["device_traces"][0]]
    assert actions.count("alloc") == 2 and actions.count("free_completed") == 1, actions
    assert sum(s["total_size"] for s in snapshot["segments"]) == torch.cuda.memory_reserved()
    del b


@feature
def memory_pools_and_limits():
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        a = torch.empty(5 << 20, dtype=torch.uint8, device=D)
    assert any(
        segment["address"] <= a.data_ptr() < segment["address"] + segment["total_size"]
        for segment in pool.snapshot()
    )
    assert torch.cuda.memory_summary() and torch.cuda.list_gpu_processes is not None
    cpu = a.cpu()
    assert cpu.sum().item() == 0 and a.untyped_storage().nbytes() == 5 << 20


@feature
def scripted_and_traced():
    @torch.jit.script
    def fused(x, y):
        return torch.relu(x * y + x)

    x = torch.randn(100, device=D)
    for _ in range(4):
        fused(x, x)
    torch.jit.trace(nn.Linear(4, 4).cuda(), torch.randn(2, 4, device=D))(torch.randn(2, 4, device=D))


@feature
def profiler():
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds, profile_memory=True, record_shapes=True) as run:
        torch.randn(100, 100, device=D) @ torch.randn(100, 100, device=D)
    assert any(event.key == "aten::mm" for event in run.key_averages())


@feature
def saving_and_loading():
    import io

    model = nn.Linear(16, 16).cuda()
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    nn.Linear(16, 16).cuda().load_state_dict(torch.load(buffer, map_location=D))


@feature
def flex_and_nested():
    nested = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], device=D)
    assert torch.nested.to_padded_tensor(nested, 0.0).shape[0] == 2


@feature
def functional_transforms():
    from torch.func import functional_call, grad, vmap

    model = nn.Linear(8, 8).cuda()
    parameters = dict(model.named_parameters())
    one = grad(lambda p, x: functional_call(model, p, (x,)).sum())
    assert vmap(one, in_dims=(None, 0))(parameters, torch.randn(4, 8, device=D))["weight"].shape == (4, 8, 8)
    torch.autograd.functional.hessian(lambda x: (x**3).sum(), torch.randn(3, device=D))


wanted = sys.argv[1:]
failed = 0
for function in FEATURES:
    if wanted and function.__name__ not in wanted:
        continue
    started = time.monotonic()
    try:
        result = function()
        torch.cuda.synchronize()
    except Exception:
        failed += 1
        print(f"FAILED {function.__name__}")
        traceback.print_exc(file=sys.stdout)
    else:
        print(
            f"ok {function.__name__} {time.monotonic() - started:.2f}s {'' if result is None else result}",
            flush=True,
        )
    # Reference cycles of one feature must not count for the next.
    gc.collect()
    torch.cuda.empty_cache()
sys.exit(failed > 0)
