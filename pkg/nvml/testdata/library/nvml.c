// SPDX-License-Identifier: Apache-2.0

// A libnvidia-ml.so.1 with the required functions only: two GPUs with a UUID and a minor number.
// VERSION is the driver's; NO_ERROR_STRING leaves out one that every use needs.

#include <string.h>

static int gpus[2];

int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }

#ifndef NO_ERROR_STRING
const char *nvmlErrorString(int ret) { return ret ? "an error" : "success"; }
#endif

static int answer(char *into, unsigned length, const char *text) {
	if (strlen(text) + 1 > length)
		return 7; // NVML_ERROR_INSUFFICIENT_SIZE
	strcpy(into, text);
	return 0;
}

int nvmlSystemGetDriverVersion(char *version, unsigned length) { return answer(version, length, VERSION); }

int nvmlDeviceGetCount_v2(unsigned *count) {
	*count = 2;
	return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
	if (index > 1)
		return 2; // NVML_ERROR_INVALID_ARGUMENT
	*device = &gpus[index];
	return 0;
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
	return answer(uuid, length, device == gpus ? "GPU-00000000-0000-0000-0000-000000000001"
	                                           : "GPU-00000000-0000-0000-0000-000000000002");
}

int nvmlDeviceGetMinorNumber(void *device, unsigned *minor) {
	*minor = (int *)device - gpus;
	return 0;
}

// The other required functions, which these GPUs do not support (NVML_ERROR_NOT_SUPPORTED).
#define UNSUPPORTED(name) \
	int name(void) { return 3; }

UNSUPPORTED(nvmlSystemGetCudaDriverVersion)
UNSUPPORTED(nvmlDeviceGetHandleByUUID)
UNSUPPORTED(nvmlDeviceGetHandleByPciBusId_v2)
UNSUPPORTED(nvmlDeviceGetIndex)
UNSUPPORTED(nvmlDeviceGetName)
UNSUPPORTED(nvmlDeviceGetBrand)
UNSUPPORTED(nvmlDeviceGetCudaComputeCapability)
UNSUPPORTED(nvmlDeviceGetPciInfo_v3)
UNSUPPORTED(nvmlDeviceGetMemoryInfo)
UNSUPPORTED(nvmlDeviceGetEccMode)
UNSUPPORTED(nvmlDeviceGetComputeMode)
UNSUPPORTED(nvmlDeviceSetComputeMode)
UNSUPPORTED(nvmlDeviceGetPersistenceMode)
UNSUPPORTED(nvmlDeviceGetNvLinkState)
UNSUPPORTED(nvmlDeviceGetNvLinkRemotePciInfo_v2)
UNSUPPORTED(nvmlDeviceGetTopologyCommonAncestor)
