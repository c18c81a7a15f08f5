"""The resources of the machine: its probe, its accelerators, the native library and the kernels."""
