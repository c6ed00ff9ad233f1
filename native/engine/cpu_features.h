// cpu_features.h: which sets of instructions this processor has, of those that kernels are compiled for.
//
// A hypervisor may mask each extension. The built-in function also asks whether the system saves the registers.
#pragma once

namespace penstock::engine {

#if defined(__x86_64__)
inline bool has_avx2() {
    static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return has;
}

inline bool has_avx512() {
    static const bool has = has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return has;
}

#if defined(PENSTOCK_COMPILES_BF16)
inline bool has_avx512_bf16() {
    static const bool has = has_avx512() && __builtin_cpu_supports("avx512bf16");
    return has;
}
#endif
#else
inline bool has_avx2() { return false; }
inline bool has_avx512() { return false; }
#endif

}  // namespace penstock::engine
