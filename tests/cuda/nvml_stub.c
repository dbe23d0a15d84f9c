/* libnvidia-ml.so.1 of a machine with eight H100. Handles are index + 1. Layouts: NVML API reference. */
#include <stdio.h>
#include <string.h>

#define GPUS 8
typedef unsigned int u32;
typedef unsigned long long u64;

/* NVML counts its sessions; callers shut it down until it returns an error. */
static int users = 0;
int nvmlInit(void) { users++; return 0; }
int nvmlInit_v2(void) { users++; return 0; }
int nvmlInitWithFlags(u32 flags) { users++; return 0; }
int nvmlShutdown(void) { return users > 0 ? (users--, 0) : 1; /* NVML_ERROR_UNINITIALIZED */ }
const char *nvmlErrorString(int code) { return "stub"; }
int nvmlSystemGetDriverVersion(char *text, u32 size) { snprintf(text, size, "580.65.06"); return 0; }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = 13000; return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return 0; }
int nvmlDeviceGetCount(u32 *count) { *count = GPUS; return 0; }
int nvmlDeviceGetCount_v2(u32 *count) { *count = GPUS; return 0; }
int nvmlDeviceGetHandleByIndex_v2(u32 index, void **device) {
    if (index >= GPUS) return 2;
    *device = (void *)(u64)(index + 1);
    return 0;
}
int nvmlDeviceGetHandleByIndex(u32 index, void **device) { return nvmlDeviceGetHandleByIndex_v2(index, device); }
int nvmlDeviceGetIndex(void *device, u32 *index) { *index = (u32)((u64)device - 1); return 0; }
int nvmlDeviceGetName(void *device, char *name, u32 size) { snprintf(name, size, "NVIDIA H100 80GB HBM3"); return 0; }
int nvmlDeviceGetUUID(void *device, char *uuid, u32 size) {
    snprintf(uuid, size, "GPU-00000000-0000-0000-0000-%012llu", (u64)device);
    return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) { *major = 9; *minor = 0; return 0; }
int nvmlDeviceGetMemoryInfo(void *device, u64 *info) {
    info[0] = 85520809984ull; info[1] = 85000000000ull; info[2] = info[0] - info[1];
    return 0;
}
int nvmlDeviceGetP2PStatus(void *one, void *other, int index, int *status) { *status = 0; return 0; }
