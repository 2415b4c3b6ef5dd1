"""Loads the tracer's modules so that no `import` of the program can reach them.

The modules are ordinary files that import one another with `from .name import ...` (and in no other way).
They are compiled into the library, so no file is read. They have no entries in `sys.modules`, and the
interpreter's own import is unchanged, because each module gets a copy of the built-ins whose `__import__`
resolves relative names here.

This file is evaluated first, by src/tracer/preload/python/injection.rs, which then calls `load`.
"""


def load(native, run_module, builtins):
    """Returns a function that returns a module of the tracer by name, and runs the module on first use.

    `native` is the module of C functions; `run_module(name, namespace)` compiles and runs a file.
    """
    modules = {"native": native}
    own_builtins = dict(builtins)
    program_import = builtins["__import__"]

    def module_named(name):
        module = modules.get(name)
        if module is None:
            module = modules[name] = type(native)(name)
            namespace = vars(module)
            # dynamo traces into hooks, and resolves a global by importing the module that `__name__` names.
            # Without `__name__`, it uses the namespace itself.
            del namespace["__name__"]
            namespace["__builtins__"] = own_builtins
            run_module(name, namespace)
        return module

    def import_module(name, globals=None, locals=None, fromlist=(), level=0):
        if level:
            return module_named(name)
        return program_import(name, globals, locals, fromlist)

    own_builtins["__import__"] = import_module
    # From Python 3.15 on, a program may make each import of the process lazy, which would need `__name__`.
    own_builtins["__lazy_import__"] = import_module
    return module_named
