// A device guard of CUDA that does nothing: torch's CPU build has none. tests/support/cuda_double.py loads it.
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace {
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>);
}
