"""relay.py DELAY_S NAMESPACE=ADDRESS...: a network between namespaces that delivers each packet after a delay.

Each namespace has a device `tun0` with its address. The kernel here has no netem. After SIGUSR1 packets come at once,
after SIGUSR2 late again. Ends with its process.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import selectors
import signal
import struct
import sys
import time
from collections import deque

_CLONE_NEWNET, _TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x40000000, 0x400454CA, 0x0001, 0x1000
_PACKET_BYTES = 65535


def open_device(namespace: str) -> int:
    """A descriptor of a new device `tun0` in a namespace."""
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        if libc.setns(there, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", b"tun0", _IFF_TUN | _IFF_NO_PI))
        libc.setns(here, _CLONE_NEWNET)
    finally:
        os.close(here), os.close(there)
    return device


def relay(delay_s: float, devices: dict[bytes, int]) -> None:
    """Deliver packets by the address that they are for, in the order in which they came."""
    delays_s = [delay_s]
    signal.signal(signal.SIGUSR1, lambda *_: delays_s.append(0.0))
    signal.signal(signal.SIGUSR2, lambda *_: delays_s.append(delay_s))
    selector = selectors.DefaultSelector()
    for device in devices.values():
        selector.register(device, selectors.EVENT_READ)
    waiting = deque[tuple[float, int, bytes]]()
    while True:
        left_s = max(waiting[0][0] - time.monotonic(), 0.0) if waiting else None
        for key, _ in selector.select(left_s):
            try:
                packet = os.read(key.fd, _PACKET_BYTES)
            except BlockingIOError:
                continue
            if (to := devices.get(packet[16:20])) is not None:  # of IPv4; others are the kernel's own
                waiting.append((time.monotonic() + delays_s[-1], to, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, to, packet = waiting.popleft()
            os.write(to, packet)


if __name__ == "__main__":
    pairs = [each.partition("=") for each in sys.argv[2:]]
    devices = {bytes(map(int, address.split("."))): open_device(name) for name, _, address in pairs}
    print("open", flush=True)
    relay(float(sys.argv[1]), devices)
