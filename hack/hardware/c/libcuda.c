// SPDX-License-Identifier: Apache-2.0

// A libcuda.so.1 for the stand-in of a driver: just enough for cuda.c, so that the tests of hardware can be tested. It has the GPUs whose
// device nodes it sees, and none without the control nodes. They are in /dev, as in a container, or in the directory
// TANDEM_HARDWARE_STAND_IN_DEV. DEVICES is a list of {minor, UUID}. Memory is the process's own.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

struct gpu {
	int minor;
	unsigned char uuid[16];
};
static const struct gpu known[] = {DEVICES};
static const struct gpu *visible[64];
static int count, failed;

#define OK 0
#define INVALID_VALUE 1
#define OUT_OF_MEMORY 2
#define NO_DEVICE 100
#define ILLEGAL_ADDRESS 700

static int isDevice(const char *name) {
	const char *dev = getenv("TANDEM_HARDWARE_STAND_IN_DEV");
	char path[4096];
	struct stat file;
	snprintf(path, sizeof path, "%s/%s", dev ? dev : "/dev", name);
	return stat(path, &file) == 0 && S_ISCHR(file.st_mode);
}

int cuInit(unsigned flags) {
	(void)flags;
	if (!isDevice("nvidiactl") || !isDevice("nvidia-uvm"))
		return NO_DEVICE;
	for (size_t i = 0; i < sizeof known / sizeof *known && count < 64; i++) {
		char name[32];
		snprintf(name, sizeof name, "nvidia%d", known[i].minor);
		if (isDevice(name))
			visible[count++] = &known[i];
	}
	return count ? OK : NO_DEVICE;
}

int cuDeviceGetCount(int *n) {
	*n = count;
	return OK;
}

int cuDeviceGet(int *device, int i) {
	*device = i;
	return i < count ? OK : INVALID_VALUE;
}

int cuDeviceGetUuid(void *uuid, int device) {
	memcpy(uuid, visible[device]->uuid, 16);
	return OK;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
	*context = (void *)visible[device];
	return OK;
}

int cuCtxSetCurrent(void *context) { return context ? OK : INVALID_VALUE; }

int cuModuleLoadData(void **module, const void *image) {
	*module = (void *)image;
	return OK;
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
	*function = module;
	return strcmp(name, "fill") ? INVALID_VALUE : OK;
}

// As CUDA does it: "0=1G" or "0=100M" (CUDA MPS, CUDA_MPS_PINNED_DEVICE_MEM_LIMIT).
int cuMemAlloc_v2(unsigned long long *memory, size_t size) {
	const char *limit = getenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT");
	unsigned long long most;
	char unit;
	if (limit && sscanf(limit, "0=%llu%c", &most, &unit) == 2 && size > most << (unit == 'G' ? 30 : 20))
		return OUT_OF_MEMORY;
	*memory = (unsigned long long)malloc(size);
	return *memory ? OK : OUT_OF_MEMORY;
}

int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t size) {
	memcpy(to, (void *)from, size);
	return failed;
}

int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream,
	void **args, void **extra) {
	(void)f, (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)stream, (void)extra;
	unsigned long long array = *(unsigned long long *)args[0];
	unsigned n = *(unsigned *)args[1];
	if (array < 1 << 16) {
		failed = ILLEGAL_ADDRESS;
		return OK;
	}
	for (unsigned i = 0; i < n; i++)
		((unsigned *)array)[i] = i;
	return OK;
}

int cuCtxSynchronize(void) { return failed; }
