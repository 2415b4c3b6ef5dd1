"""Sends tensors on the device to another process and back; each process prints its own peak, in bytes."""

import torch
import torch.multiprocessing as mp


def child(inbox, outbox):
    model, batch = inbox.get()
    assert (model.is_cuda, model.shape, batch.dtype) == (True, (1024, 1024), torch.float16)
    own = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    (model @ model + 1).sum()
    free = torch.cuda.mem_get_info()[0]
    outbox.put((own, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), free))
    inbox.get()
    del model, batch, own
    torch.cuda.ipc_collect()


if __name__ == "__main__":
    context = mp.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    weights = torch.ones(1024, 1024, device="cuda")
    batch = torch.ones(1000, dtype=torch.float16, device="cuda")
    process = context.Process(target=child, args=(inbox, outbox))
    process.start()
    inbox.put((weights, batch))
    own, allocated, reserved, free = outbox.get()
    assert own.numel() == 3 << 20 and own.is_cuda
    print(
        allocated, reserved, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), flush=True
    )
    # Both processes are on one device, and this one allocates nothing for the received tensor.
    assert torch.cuda.mem_get_info()[0] == free, (free, torch.cuda.mem_get_info())
    del own
    inbox.put(None)
    process.join()
    assert process.exitcode == 0, process.exitcode
