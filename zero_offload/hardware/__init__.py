"""What the machine offers: its probe, its accelerators, the native library and the kernels."""
