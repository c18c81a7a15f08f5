// Loads the native library named on the command line and calls it, on three threads too. It does so without
// Python and torch, so that it runs on a glibc that is older than theirs. Linux names the flags of processors
// of x86.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "../csrc/include/zero_offload.h"

int main(int, char **arguments) {
    void *library = dlopen(arguments[1], RTLD_NOW);
    if (library == nullptr) {
        std::fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    const auto abi = reinterpret_cast<decltype(&zo_abi)>(dlsym(library, "zo_abi"));
    const auto sumsq = reinterpret_cast<decltype(&zo_sumsq)>(dlsym(library, "zo_sumsq"));
    const auto mask =
        reinterpret_cast<decltype(&zo_isa_supported_mask)>(dlsym(library, "zo_isa_supported_mask"));
    zo_abi_info info{};
    info.size = sizeof info;
    const std::vector<float> values(1 << 20, 2.0f);
    double sum = 0;
    int32_t finite = 0;
    const int status = abi(&info);
    const int summed = sumsq(ZO_FP32, values.data(), int64_t(values.size()), 3, &sum, &finite);
    std::printf("ABI %u, instruction sets %#x, squares add up to %.0f\n", info.version, mask(), sum);
    bool is_seen = true;
#if defined(__x86_64__)
    std::ifstream file("/proc/cpuinfo");
    const std::string flags{std::istreambuf_iterator<char>(file), {}};
    is_seen = (flags.find(" avx2 ") != std::string::npos) == ((mask() >> ZO_ISA_AVX2 & 1) != 0);
    if (!is_seen) std::printf("/proc/cpuinfo and the library do not agree on AVX2\n");
#endif
    const bool adds_up = summed == 0 && finite == 1 && sum == 4.0 * double(values.size());
    return status == 0 && adds_up && is_seen ? 0 : 1;
}
