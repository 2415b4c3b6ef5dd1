"""Asks `accelerate launch` for the ranks that it would start. Accelerate itself resolves its options, its
configuration file and its defaults. Prints the arguments for torchrun and the variables that accelerate sets,
as JSON, on stdout.

argv: the number of cards of this machine, and the arguments of `accelerate launch`."""

import json
import os
import sys
from types import SimpleNamespace


def main() -> None:
    answer = os.fdopen(os.dup(1), "w")
    # Stdout is only for the answer, so everything that accelerate prints goes to stderr.
    os.dup2(2, 1)
    cards, *arguments = sys.argv[1:]

    import torch
    import torch.distributed.run as torchrun

    torch.cuda.device_count = lambda: int(cards)
    torch.cuda.is_available = lambda: True
    torch.cuda.is_bf16_supported = lambda *_args, **_options: True

    import accelerate.utils.launch
    from accelerate.commands import launch

    # The ranks of a simulated machine use a port of their own, so a port in use does not matter.
    if hasattr(accelerate.utils.launch, "is_port_in_use"):
        accelerate.utils.launch.is_port_in_use = lambda *_args: False
    before = dict(os.environ)

    def run(args) -> None:
        words = ["--nnodes", str(args.nnodes), "--nproc-per-node", str(args.nproc_per_node)]
        for name in ("role", "rdzv_id", "max_restarts"):
            words += [f"--{name}", str(getattr(args, name))]
        for name in ("module", "no_python", "virtual_local_rank"):
            if getattr(args, name, False):
                words.append(f"--{name}")
        words += ["--", args.training_script, *args.training_script_args]
        variables = {name: value for name, value in os.environ.items() if before.get(name) != value}
        json.dump({"arguments": words, "variables": variables}, answer)

    torchrun.run = run
    parser = launch.launch_command_parser()
    args = parser.parse_args(arguments)
    # Accelerate needs a machine rank, but the answer is the same for every machine.
    if args.machine_rank is None:
        args.machine_rank = 0

    def refused(*_args, **_options):
        raise SystemExit("accelerate would start other processes than the ranks of torchrun")

    # Refuse the launchers for a single process and for other kinds of machines.
    launch.simple_launcher = refused
    launch.tpu_launcher = launch.tpu_pod_launcher = launch.sagemaker_launcher = refused
    launch.subprocess = SimpleNamespace(Popen=refused)
    launch.launch_command(args)
    answer.close()


main()
