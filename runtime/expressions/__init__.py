"""Programs as data: a stage's jaxpr becomes a list of equations, and a task makes a function of jax.lax of it again.

Why a list, and not a module of StableHLO that is verified: XLA trusts what it compiles, and MLIR's
reader, which runs before any verifier can, ended the process at about one in a hundred damaged
modules. A list is read by protobuf and by Python alone, holds no shapes that could be wrong, and
cannot refer to itself. It costs nothing: for the update of Adam of an MLP the client writes it in 3
ms of processor time, where exporting takes 12 ms, and the task makes and compiles it in 333 ms,
where reading, verifying and compiling the module takes 331 ms; it has 2 kB instead of 5.

Modules: ``kinds`` (attributes), ``table`` (operations), ``writer`` (on the client), ``reader`` (on
the task).
"""
