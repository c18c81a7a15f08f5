#!/bin/sh
# ziglang 0.17.1, `zig c++` for x86-64 Linux: `__builtin_cpu_supports` answers no to every name, and
# `__builtin_cpu_is("intel")` and "amd" too. A program that chooses its kernels so runs the slowest ones, in silence.
#
# clang compiles the builtins to a look into `__cpu_model` and `__cpu_features2` of the compiler's runtime. zig 0.15 has
# no such names in its own runtime, and linking ends with an error. zig 0.17 has them and fills them with nothing;
# `__builtin_cpu_init()` changes nothing. One would expect the processor's features, as by GCC and clang, or the error.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check ziglang==0.17.1
[ "$(uname -m)" = x86_64 ] || { echo "needs x86-64"; exit 3; }
cd "$work"
cat > asks.cpp <<'CPP'
#include <cstdio>
int main() {
    __builtin_cpu_init();
    std::printf("sse2 %d sse4.2 %d avx %d avx2 %d intel %d amd %d\n", !!__builtin_cpu_supports("sse2"),
                !!__builtin_cpu_supports("sse4.2"), !!__builtin_cpu_supports("avx"),
                !!__builtin_cpu_supports("avx2"), !!__builtin_cpu_is("intel"), !!__builtin_cpu_is("amd"));
}
CPP
none="sse2 0 sse4.2 0 avx 0 avx2 0 intel 0 amd 0"
echo "zig $("$venv/bin/python" -m ziglang version)"
has=$(grep -m1 '^flags' /proc/cpuinfo | tr ' ' '\n' | grep -cx -e sse2 -e sse4_2 -e avx -e avx2)
echo "/proc/cpuinfo has $has of sse2, sse4_2, avx and avx2"
"$venv/bin/python" -m ziglang c++ -O2 -target x86_64-linux-gnu.2.28 asks.cpp -o asks
"$venv/bin/python" -m ziglang c++ -O2 asks.cpp -o asks_here
for_tag=$(./asks) here=$(./asks_here)
echo "for x86_64-linux-gnu.2.28: $for_tag"
echo "for this machine:          $here"
[ "$has" -gt 0 ] && [ "$for_tag" = "$none" ] && [ "$here" = "$none" ]
