// SPDX-License-Identifier: Apache-2.0

// A program that uses a GPU through the CUDA driver API, which it loads like any CUDA program loads it. It needs no CUDA toolkit.
//
//   cuda none            does nothing, for a container without a GPU
//   cuda run             runs a kernel on the first GPU and checks its result; prints the UUIDs of the GPUs that it sees
//   cuda loop SECONDS    keeps the GPU busy
//   cuda hold            prints "holding" with a context open, and ends when its input does
//   cuda memory MIB      allocates so much memory
//   cuda fault           runs a kernel that writes to an address that does not exist, and expects CUDA's error 700
//
// The exit status is 0, 1 if CUDA answers with an error, which is printed, and 2 if a result is wrong.

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

// From cuda.h (CUDA driver API).
typedef int CUresult;
typedef int CUdevice;
typedef void *CUcontext, *CUmodule, *CUfunction, *CUstream;
typedef unsigned long long CUdeviceptr;
typedef struct {
	char bytes[16];
} CUuuid;
#define CUDA_ERROR_ILLEGAL_ADDRESS 700

// fill writes its index into each element of an array.
static const char ptx[] =
	".version 6.3\n"
	".target sm_75\n"
	".address_size 64\n"
	".visible .entry fill(.param .u64 array, .param .u32 count)\n"
	"{\n"
	"  .reg .pred %p<2>;\n"
	"  .reg .b32 %r<6>;\n"
	"  .reg .b64 %rd<5>;\n"
	"  ld.param.u64 %rd1, [array];\n"
	"  ld.param.u32 %r1, [count];\n"
	"  mov.u32 %r2, %ctaid.x;\n"
	"  mov.u32 %r3, %ntid.x;\n"
	"  mov.u32 %r4, %tid.x;\n"
	"  mad.lo.s32 %r5, %r2, %r3, %r4;\n"
	"  setp.ge.u32 %p1, %r5, %r1;\n"
	"  @%p1 bra END;\n"
	"  cvta.to.global.u64 %rd2, %rd1;\n"
	"  mul.wide.u32 %rd3, %r5, 4;\n"
	"  add.s64 %rd4, %rd2, %rd3;\n"
	"  st.global.u32 [%rd4], %r5;\n"
	"END:\n"
	"  ret;\n"
	"}\n";

static void *library;

static void *function(const char *name) {
	void *found = dlsym(library, name);
	if (!found) {
		printf("error: libcuda.so.1 lacks %s\n", name);
		exit(1);
	}
	return found;
}

static CUresult call(const char *name, CUresult result) {
	if (result) {
		printf("error: %s: %d\n", name, result);
		exit(1);
	}
	return result;
}

#define LOAD(name, ...) CUresult (*name)(__VA_ARGS__) = (CUresult(*)(__VA_ARGS__))function(#name)
#define DO(name, ...) call(#name, name(__VA_ARGS__))

static void printUUID(CUuuid u) {
	printf("GPU-");
	for (int i = 0; i < 16; i++)
		printf("%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", (unsigned char)u.bytes[i]);
}

int main(int argc, char **argv) {
	setvbuf(stdout, NULL, _IOLBF, 0);
	const char *mode = argc > 1 ? argv[1] : "run";
	if (!strcmp(mode, "none"))
		return 0;
	library = dlopen("libcuda.so.1", RTLD_NOW);
	if (!library) {
		printf("error: %s\n", dlerror());
		return 1;
	}
	LOAD(cuInit, unsigned);
	LOAD(cuDeviceGetCount, int *);
	LOAD(cuDeviceGet, CUdevice *, int);
	LOAD(cuDeviceGetUuid, CUuuid *, CUdevice);
	LOAD(cuDevicePrimaryCtxRetain, CUcontext *, CUdevice);
	LOAD(cuCtxSetCurrent, CUcontext);
	LOAD(cuModuleLoadData, CUmodule *, const void *);
	LOAD(cuModuleGetFunction, CUfunction *, CUmodule, const char *);
	LOAD(cuMemAlloc_v2, CUdeviceptr *, size_t);
	LOAD(cuMemcpyDtoH_v2, void *, CUdeviceptr, size_t);
	LOAD(cuLaunchKernel, CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **);
	LOAD(cuCtxSynchronize, void);

	DO(cuInit, 0);
	int count = 0;
	DO(cuDeviceGetCount, &count);
	for (int i = 0; i < count; i++) {
		CUdevice d;
		CUuuid uuid;
		DO(cuDeviceGet, &d, i);
		DO(cuDeviceGetUuid, &uuid, d);
		printf("device %d ", i);
		printUUID(uuid);
		printf("\n");
	}
	CUdevice device;
	CUcontext context;
	DO(cuDeviceGet, &device, 0);
	DO(cuDevicePrimaryCtxRetain, &context, device);
	DO(cuCtxSetCurrent, context);
	if (!strcmp(mode, "memory")) {
		CUdeviceptr memory;
		DO(cuMemAlloc_v2, &memory, (size_t)strtoull(argv[2], NULL, 10) << 20);
		printf("allocated\n");
		return 0;
	}
	CUmodule module;
	CUfunction fill;
	DO(cuModuleLoadData, &module, ptx);
	DO(cuModuleGetFunction, &fill, module, "fill");
	enum { size = 1 << 16 };
	static unsigned result[size];
	unsigned n = size;
	CUdeviceptr array;
	DO(cuMemAlloc_v2, &array, sizeof result);
	if (!strcmp(mode, "fault")) {
		CUdeviceptr nowhere = 4096;
		void *args[] = {&nowhere, &n};
		DO(cuLaunchKernel, fill, size / 256, 1, 1, 256, 1, 1, 0, NULL, args, NULL);
		CUresult got = cuCtxSynchronize();
		struct timespec now;
		clock_gettime(CLOCK_REALTIME, &now);
		printf("fault %d at %lld.%09ld\n", got, (long long)now.tv_sec, now.tv_nsec);
		return got == CUDA_ERROR_ILLEGAL_ADDRESS ? 0 : 2;
	}
	void *args[] = {&array, &n};
	time_t until = time(NULL) + (!strcmp(mode, "loop") ? atoi(argv[2]) : 0);
	do {
		DO(cuLaunchKernel, fill, size / 256, 1, 1, 256, 1, 1, 0, NULL, args, NULL);
		DO(cuCtxSynchronize);
	} while (time(NULL) < until);
	DO(cuMemcpyDtoH_v2, result, array, sizeof result);
	for (unsigned i = 0; i < size; i++)
		if (result[i] != i) {
			printf("error: element %u is %u\n", i, result[i]);
			return 2;
		}
	printf("kernel ok\n");
	if (!strcmp(mode, "hold")) {
		printf("holding\n");
		for (char c; read(0, &c, 1) > 0;)
			;
	}
	return 0;
}
