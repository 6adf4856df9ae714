// SPDX-License-Identifier: Apache-2.0

// A libnvidia-ml.so.1 that answers from a table: the recording of a driver. The types and prototypes are those of NVIDIA's nvml.h, so
// that the compiler checks this file against NVIDIA's description of the interface, not against go-nvml's.
//
// Beside the library LIB lie LIB.table, which package recording writes, and LIB.faults, which a test may write at any time. A line of the
// latter, "<handle or *> <method> <return code>", makes calls fail; with the return code -1 they hang until the line is gone.
//
// A call that is not in the table answers NVML_ERROR_NOT_SUPPORTED.

#define _GNU_SOURCE
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "nvml.h"

struct field {
	char *path, *text;
};

struct entry {
	char *on, *method, *args;
	nvmlReturn_t ret;
	struct field *fields;
	int count;
};

// A handle is the address of its name.
struct handle {
	char name[128];
	struct handle *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct entry *table;
static int entries;
static struct handle *handles;
static int users;

static const char *library(void) {
	Dl_info info;
	return dladdr((void *)library, &info) ? info.dli_fname : "libnvidia-ml.so.1";
}

static FILE *beside(const char *suffix) {
	char path[4096], *resolved = realpath(library(), NULL);
	snprintf(path, sizeof path, "%s%s", resolved ? resolved : library(), suffix);
	free(resolved);
	return fopen(path, "r");
}

// load reads the table, once.
static void load(void) {
	FILE *file = table ? NULL : beside(".table");
	char *line = NULL;
	size_t size = 0;
	ssize_t length;
	while (file && (length = getline(&line, &size, file)) > 0) {
		if (line[length - 1] == '\n')
			line[length - 1] = 0;
		char *rest = line, *part[5] = {0};
		for (int i = 0; i < 5 && rest; i++)
			part[i] = strsep(&rest, "\t");
		if (part[4] && !strcmp(part[0], "C")) {
			table = realloc(table, ++entries * sizeof *table);
			table[entries - 1] = (struct entry){strdup(part[1]), strdup(part[2]), strdup(part[3]), atoi(part[4]), NULL, 0};
		} else if (part[2] && !strcmp(part[0], "V") && entries) {
			struct entry *e = &table[entries - 1];
			e->fields = realloc(e->fields, ++e->count * sizeof *e->fields);
			e->fields[e->count - 1] = (struct field){strdup(part[1]), strdup(part[2])};
		}
	}
	free(line);
	if (file)
		fclose(file);
}

// fault returns the return code that a line of the faults file gives a call; 0 for none, -1 for one that hangs.
static int fault(const char *on, const char *method) {
	FILE *file = beside(".faults");
	char name[128], call[128];
	int ret, found = 0;
	while (file && fscanf(file, "%127s %127s %d", name, call, &ret) == 3)
		if ((!strcmp(name, "*") || !strcmp(name, on)) && !strcmp(call, method))
			found = ret;
	if (file)
		fclose(file);
	return found;
}

static void *handle(const char *name) {
	struct handle *h;
	pthread_mutex_lock(&lock);
	for (h = handles; h && strcmp(h->name, name); h = h->next)
		;
	if (!h) {
		h = calloc(1, sizeof *h);
		snprintf(h->name, sizeof h->name, "%s", name);
		h->next = handles;
		handles = h;
	}
	pthread_mutex_unlock(&lock);
	return h;
}

static nvmlReturn_t ask(struct entry **answer, const char *on, const char *method, const char *format, ...) {
	static struct entry empty;
	char args[256];
	va_list list;
	va_start(list, format);
	vsnprintf(args, sizeof args, format, list);
	va_end(list);
	*answer = &empty;
	int injected;
	while ((injected = fault(on, method)) == -1)
		usleep(10000);
	if (injected)
		return injected;
	if (!users)
		return NVML_ERROR_UNINITIALIZED;
	for (int i = 0; i < entries; i++)
		if (!strcmp(table[i].method, method) && !strcmp(table[i].on, on) && !strcmp(table[i].args, args)) {
			*answer = &table[i];
			return table[i].ret;
		}
	return NVML_ERROR_NOT_SUPPORTED;
}

static const char *text(const struct entry *e, const char *format, ...) {
	char path[128];
	va_list list;
	va_start(list, format);
	vsnprintf(path, sizeof path, format, list);
	va_end(list);
	for (int i = 0; i < e->count; i++)
		if (!strcmp(e->fields[i].path, path))
			return e->fields[i].text;
	return NULL;
}

#define NUM(...) number(text(e, __VA_ARGS__))
static unsigned long long number(const char *digits) {
	if (!digits)
		return 0;
	return *digits == '-' ? (unsigned long long)strtoll(digits, NULL, 10) : strtoull(digits, NULL, 10);
}

static void bytes(const char *hexadecimal, void *into, size_t size) {
	unsigned byte;
	memset(into, 0, size);
	for (size_t i = 0; hexadecimal && i < size && sscanf(hexadecimal + 2 * i, "%2x", &byte) == 1; i++)
		((unsigned char *)into)[i] = byte;
}

static nvmlReturn_t copy(const char *from, char *into, unsigned length) {
	from = from ? from : "";
	if (strlen(from) + 1 > length)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	strcpy(into, from);
	return NVML_SUCCESS;
}

// go-nvml's copy of nvml.h has each handle as a struct with one pointer, which is passed as that pointer.
#define NAME(h) (((struct handle *)h.handle)->name)
#define NEED(pointer) \
	if (!(pointer)) \
	return NVML_ERROR_INVALID_ARGUMENT
// ON begins a function about a handle: it returns unless the recorded call has succeeded.
#define ON(h, method, ...) \
	struct entry *e; \
	NEED(h.handle); \
	nvmlReturn_t ret = ask(&e, NAME(h), method, __VA_ARGS__); \
	if (ret != NVML_SUCCESS) \
	return ret
#define LIBRARY(method, ...) \
	struct entry *e; \
	nvmlReturn_t ret = ask(&e, "-", method, __VA_ARGS__); \
	if (ret != NVML_SUCCESS) \
	return ret
// An earlier version of a function that has the same parameters.
#define ALSO(name, of, params) nvmlReturn_t name params __attribute__((alias(of)))

// GET is a function with one number as its result.
#define GET(method, type) \
	nvmlReturn_t nvmlDevice##method(nvmlDevice_t d, type *value) { \
		NEED(value); \
		ON(d, #method, "%s", ""); \
		*value = (type)NUM("0"); \
		return NVML_SUCCESS; \
	}

nvmlReturn_t nvmlInit_v2(void) {
	struct entry *e;
	pthread_mutex_lock(&lock);
	load();
	users++;
	pthread_mutex_unlock(&lock);
	nvmlReturn_t ret = ask(&e, "-", "Init", "%s", "");
	if (ret == NVML_SUCCESS || ret == NVML_ERROR_NOT_SUPPORTED)
		return NVML_SUCCESS;
	pthread_mutex_lock(&lock);
	users--;
	pthread_mutex_unlock(&lock);
	return ret;
}
ALSO(nvmlInit, "nvmlInit_v2", (void));

nvmlReturn_t nvmlShutdown(void) {
	pthread_mutex_lock(&lock);
	int were = users;
	users -= users > 0;
	pthread_mutex_unlock(&lock);
	return were ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

const char *nvmlErrorString(nvmlReturn_t ret) {
	static __thread char words[32];
	snprintf(words, sizeof words, "table error %d", ret);
	return ret == NVML_SUCCESS ? "Success" : words;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length) {
	LIBRARY("SystemGetDriverVersion", "%s", "");
	return copy(text(e, "0"), version, length);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) {
	LIBRARY("SystemGetCudaDriverVersion", "%s", "");
	*version = NUM("0");
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
	LIBRARY("DeviceGetCount", "%s", "");
	*count = NUM("0");
	return NVML_SUCCESS;
}
ALSO(nvmlDeviceGetCount, "nvmlDeviceGetCount_v2", (unsigned *));

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
	LIBRARY("DeviceGetHandleByIndex", "%u", index);
	device->handle = handle(text(e, "0"));
	return NVML_SUCCESS;
}
ALSO(nvmlDeviceGetHandleByIndex, "nvmlDeviceGetHandleByIndex_v2", (unsigned, nvmlDevice_t *));

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
	LIBRARY("DeviceGetHandleByUUID", "%s", uuid);
	device->handle = handle(text(e, "0"));
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *address, nvmlDevice_t *device) {
	LIBRARY("DeviceGetHandleByPciBusId", "%s", address);
	device->handle = handle(text(e, "0"));
	return NVML_SUCCESS;
}
ALSO(nvmlDeviceGetHandleByPciBusId, "nvmlDeviceGetHandleByPciBusId_v2", (const char *, nvmlDevice_t *));

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t d, char *uuid, unsigned length) {
	ON(d, "GetUUID", "%s", "");
	return copy(text(e, "0"), uuid, length);
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t d, char *name, unsigned length) {
	ON(d, "GetName", "%s", "");
	return copy(text(e, "0"), name, length);
}

GET(GetIndex, unsigned)
GET(GetMinorNumber, unsigned)
GET(GetBrand, nvmlBrandType_t)
GET(GetArchitecture, nvmlDeviceArchitecture_t)
GET(GetComputeMode, nvmlComputeMode_t)
GET(GetPersistenceMode, nvmlEnableState_t)
GET(GetMaxMigDeviceCount, unsigned)
GET(GetGpuInstanceId, unsigned)
GET(GetComputeInstanceId, unsigned)
GET(GetCurrentClocksEventReasons, unsigned long long)
GET(GetRetiredPagesPendingStatus, nvmlEnableState_t)

nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t d, unsigned *is) {
	ON(d, "IsMigDeviceHandle", "%s", "");
	*is = NUM("0");
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceSetComputeMode(nvmlDevice_t d, nvmlComputeMode_t mode) {
	ON(d, "SetComputeMode", "%d", mode);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t d, int *major, int *minor) {
	ON(d, "GetCudaComputeCapability", "%s", "");
	*major = NUM("0"), *minor = NUM("1");
	return NVML_SUCCESS;
}

static void pciInfo(const struct entry *e, nvmlPciInfo_t *pci) {
	memset(pci, 0, sizeof *pci);
	pci->domain = NUM("0.Domain"), pci->bus = NUM("0.Bus"), pci->device = NUM("0.Device");
	pci->pciDeviceId = NUM("0.PciDeviceId"), pci->pciSubSystemId = NUM("0.PciSubSystemId");
	copy(text(e, "0.BusId"), pci->busId, sizeof pci->busId);
	copy(text(e, "0.BusIdLegacy"), pci->busIdLegacy, sizeof pci->busIdLegacy);
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t d, nvmlPciInfo_t *pci) {
	ON(d, "GetPciInfo", "%s", "");
	pciInfo(e, pci);
	return NVML_SUCCESS;
}
ALSO(nvmlDeviceGetPciInfo_v2, "nvmlDeviceGetPciInfo_v3", (nvmlDevice_t, nvmlPciInfo_t *));

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t d, nvmlMemory_t *memory) {
	ON(d, "GetMemoryInfo", "%s", "");
	memory->total = NUM("0.Total"), memory->free = NUM("0.Free"), memory->used = NUM("0.Used");
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t d, nvmlEnableState_t *current, nvmlEnableState_t *pending) {
	ON(d, "GetEccMode", "%s", "");
	*current = NUM("0"), *pending = NUM("1");
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t d, unsigned link, nvmlEnableState_t *active) {
	ON(d, "GetNvLinkState", "%u", link);
	*active = NUM("0");
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t d, unsigned link, nvmlPciInfo_t *pci) {
	ON(d, "GetNvLinkRemotePciInfo", "%u", link);
	pciInfo(e, pci);
	return NVML_SUCCESS;
}
ALSO(nvmlDeviceGetNvLinkRemotePciInfo, "nvmlDeviceGetNvLinkRemotePciInfo_v2", (nvmlDevice_t, unsigned, nvmlPciInfo_t *));

nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t d, unsigned link, nvmlIntNvLinkDeviceType_t *type) {
	ON(d, "GetNvLinkRemoteDeviceType", "%u", link);
	*type = NUM("0");
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t d, nvmlDevice_t other, nvmlGpuTopologyLevel_t *level) {
	NEED(other.handle);
	ON(d, "GetTopologyCommonAncestor", "%s", NAME(other));
	*level = NUM("0");
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetAddressingMode(nvmlDevice_t d, nvmlDeviceAddressingMode_t *mode) {
	if (mode->version != nvmlDeviceAddressingMode_v1)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	ON(d, "GetAddressingMode", "%s", "");
	mode->value = NUM("0.Value");
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t d, nvmlGpuFabricInfo_t *info) {
	ON(d, "GetGpuFabricInfo", "%s", "");
	bytes(text(e, "0.ClusterUuid"), info->clusterUuid, sizeof info->clusterUuid);
	info->status = NUM("0.Status"), info->cliqueId = NUM("0.CliqueId"), info->state = NUM("0.State");
	return NVML_SUCCESS;
}

// nvmlDeviceGetGpuFabricInfoV answers version 2 of the struct from what version 1 has recorded.
nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t d, nvmlGpuFabricInfoV_t *info) {
	if (info->version != nvmlGpuFabricInfo_v2)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	ON(d, "GetGpuFabricInfo", "%s", "");
	bytes(text(e, "0.ClusterUuid"), info->clusterUuid, sizeof info->clusterUuid);
	info->status = NUM("0.Status"), info->cliqueId = NUM("0.CliqueId"), info->state = NUM("0.State");
	info->healthMask = 0;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetApplicationsClock(nvmlDevice_t d, nvmlClockType_t type, unsigned *mhz) {
	ON(d, "GetApplicationsClock", "%d", type);
	*mhz = NUM("0");
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceSetApplicationsClocks(nvmlDevice_t d, unsigned memory, unsigned graphics) {
	ON(d, "SetApplicationsClocks", "%u,%u", memory, graphics);
	return NVML_SUCCESS;
}

static nvmlReturn_t processes(const struct entry *e, unsigned *count, nvmlProcessInfo_t *infos) {
	unsigned n = 0, room = *count;
	for (; text(e, "0.%u.Pid", n); n++)
		if (n < room && infos) {
			infos[n].pid = NUM("0.%u.Pid", n), infos[n].usedGpuMemory = NUM("0.%u.UsedGpuMemory", n);
			infos[n].gpuInstanceId = NUM("0.%u.GpuInstanceId", n), infos[n].computeInstanceId = NUM("0.%u.ComputeInstanceId", n);
		}
	*count = n;
	return n > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t d, unsigned *count, nvmlProcessInfo_t *infos) {
	ON(d, "GetComputeRunningProcesses", "%s", "");
	return processes(e, count, infos);
}

nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t d, unsigned *count, nvmlProcessInfo_t *infos) {
	ON(d, "GetGraphicsRunningProcesses", "%s", "");
	return processes(e, count, infos);
}

nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t d, unsigned *count, nvmlProcessInfo_t *infos) {
	ON(d, "GetMPSComputeRunningProcesses", "%s", "");
	return processes(e, count, infos);
}

// nvmlDeviceGetFieldValues answers each field by itself: one that an older driver lacks fails alone.
nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t d, int count, nvmlFieldValue_t *values) {
	NEED(d.handle);
	const char *on = NAME(d);
	struct entry *e;
	nvmlReturn_t ret = ask(&e, on, "GetFieldValues", "%s", "");
	if (ret != NVML_SUCCESS)
		return ret;
	for (int i = 0; i < count; i++) {
		nvmlFieldValue_t *v = &values[i];
		v->nvmlReturn = ask(&e, on, "GetFieldValues", "%u/%u", v->fieldId, v->scopeId);
		v->valueType = NUM("ValueType"), v->timestamp = NUM("Timestamp"), v->latencyUsec = NUM("LatencyUsec");
		bytes(text(e, "Value"), &v->value, sizeof v->value);
	}
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t d, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failure) {
	ON(d, "GetRemappedRows", "%s", "");
	*corrected = NUM("0"), *uncorrected = NUM("1"), *pending = NUM("2"), *failure = NUM("3");
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(
	nvmlDevice_t d, nvmlMemoryErrorType_t error, nvmlEccCounterType_t counter, unsigned long long *count) {
	ON(d, "GetTotalEccErrors", "%d,%d", error, counter);
	*count = NUM("0");
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t d, unsigned *current, unsigned *pending) {
	ON(d, "GetMigMode", "%s", "");
	*current = NUM("0"), *pending = NUM("1");
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceSetMigMode(nvmlDevice_t d, unsigned mode, nvmlReturn_t *activation) {
	ON(d, "SetMigMode", "%u", mode);
	*activation = NUM("0");
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t d, unsigned index, nvmlDevice_t *device) {
	ON(d, "GetMigDeviceHandleByIndex", "%u", index);
	device->handle = handle(text(e, "0"));
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t d, nvmlDevice_t *device) {
	ON(d, "GetDeviceHandleFromMigDeviceHandle", "%s", "");
	device->handle = handle(text(e, "0"));
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t d, nvmlDeviceAttributes_t *a) {
	ON(d, "GetAttributes", "%s", "");
	a->multiprocessorCount = NUM("0.MultiprocessorCount"), a->sharedCopyEngineCount = NUM("0.SharedCopyEngineCount");
	a->sharedDecoderCount = NUM("0.SharedDecoderCount"), a->sharedEncoderCount = NUM("0.SharedEncoderCount");
	a->sharedJpegCount = NUM("0.SharedJpegCount"), a->sharedOfaCount = NUM("0.SharedOfaCount");
	a->gpuInstanceSliceCount = NUM("0.GpuInstanceSliceCount"), a->memorySizeMB = NUM("0.MemorySizeMB");
	a->computeInstanceSliceCount = NUM("0.ComputeInstanceSliceCount");
	return NVML_SUCCESS;
}
ALSO(nvmlDeviceGetAttributes, "nvmlDeviceGetAttributes_v2", (nvmlDevice_t, nvmlDeviceAttributes_t *));

nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t d, unsigned profile, nvmlGpuInstanceProfileInfo_t *info) {
	ON(d, "GetGpuInstanceProfileInfo", "%u", profile);
	info->id = NUM("0.Id"), info->isP2pSupported = NUM("0.IsP2pSupported"), info->sliceCount = NUM("0.SliceCount");
	info->instanceCount = NUM("0.InstanceCount"), info->multiprocessorCount = NUM("0.MultiprocessorCount");
	info->copyEngineCount = NUM("0.CopyEngineCount"), info->decoderCount = NUM("0.DecoderCount");
	info->encoderCount = NUM("0.EncoderCount"), info->jpegCount = NUM("0.JpegCount"), info->ofaCount = NUM("0.OfaCount");
	info->memorySizeMB = NUM("0.MemorySizeMB");
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements_v2(
	nvmlDevice_t d, unsigned profile, nvmlGpuInstancePlacement_t *placements, unsigned *count) {
	ON(d, "GetGpuInstancePossiblePlacements", "%u", profile);
	unsigned n = 0, room = *count;
	for (; text(e, "0.%u.Size", n); n++)
		if (placements && n < room)
			placements[n].start = NUM("0.%u.Start", n), placements[n].size = NUM("0.%u.Size", n);
	*count = n;
	return placements && n > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}
ALSO(nvmlDeviceGetGpuInstancePossiblePlacements, "nvmlDeviceGetGpuInstancePossiblePlacements_v2",
	(nvmlDevice_t, unsigned, nvmlGpuInstancePlacement_t *, unsigned *));

static nvmlReturn_t instances(const struct entry *e, void **into, unsigned *count) {
	unsigned n = 0, room = *count;
	for (const char *name; (name = text(e, "0.%u", n)); n++)
		if (n < room)
			into[n] = handle(name);
	*count = n;
	return n > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstances(nvmlDevice_t d, unsigned profile, nvmlGpuInstance_t *into, unsigned *count) {
	ON(d, "GetGpuInstances", "%u", profile);
	return instances(e, (void **)into, count);
}

nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t d, unsigned id, nvmlGpuInstance_t *instance) {
	ON(d, "GetGpuInstanceById", "%u", id);
	instance->handle = handle(text(e, "0"));
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceCreateGpuInstanceWithPlacement(
	nvmlDevice_t d, unsigned profile, const nvmlGpuInstancePlacement_t *at, nvmlGpuInstance_t *instance) {
	ON(d, "CreateGpuInstanceWithPlacement", "%u,%u", profile, at->start);
	instance->handle = handle(text(e, "0"));
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t i, nvmlGpuInstanceInfo_t *info) {
	ON(i, "GetInfo", "%s", "");
	info->device.handle = handle(text(e, "0.Device")), info->id = NUM("0.Id"), info->profileId = NUM("0.ProfileId");
	info->placement.start = NUM("0.Placement.Start"), info->placement.size = NUM("0.Placement.Size");
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpuInstanceDestroy(nvmlGpuInstance_t i) {
	ON(i, "Destroy", "%s", "");
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfo(
	nvmlGpuInstance_t i, unsigned profile, unsigned engine, nvmlComputeInstanceProfileInfo_t *info) {
	ON(i, "GetComputeInstanceProfileInfo", "%u,%u", profile, engine);
	info->id = NUM("0.Id"), info->sliceCount = NUM("0.SliceCount"), info->instanceCount = NUM("0.InstanceCount");
	info->multiprocessorCount = NUM("0.MultiprocessorCount"), info->sharedCopyEngineCount = NUM("0.SharedCopyEngineCount");
	info->sharedDecoderCount = NUM("0.SharedDecoderCount"), info->sharedEncoderCount = NUM("0.SharedEncoderCount");
	info->sharedJpegCount = NUM("0.SharedJpegCount"), info->sharedOfaCount = NUM("0.SharedOfaCount");
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstances(nvmlGpuInstance_t i, unsigned profile, nvmlComputeInstance_t *into, unsigned *count) {
	ON(i, "GetComputeInstances", "%u", profile);
	return instances(e, (void **)into, count);
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstanceById(nvmlGpuInstance_t i, unsigned id, nvmlComputeInstance_t *instance) {
	ON(i, "GetComputeInstanceById", "%u", id);
	instance->handle = handle(text(e, "0"));
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpuInstanceCreateComputeInstance(nvmlGpuInstance_t i, unsigned profile, nvmlComputeInstance_t *instance) {
	ON(i, "CreateComputeInstance", "%u", profile);
	instance->handle = handle(text(e, "0"));
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlComputeInstanceGetInfo_v2(nvmlComputeInstance_t i, nvmlComputeInstanceInfo_t *info) {
	ON(i, "GetInfo", "%s", "");
	info->device.handle = handle(text(e, "0.Device")), info->gpuInstance.handle = handle(text(e, "0.GpuInstance"));
	info->id = NUM("0.Id"), info->profileId = NUM("0.ProfileId");
	info->placement.start = NUM("0.Placement.Start"), info->placement.size = NUM("0.Placement.Size");
	return NVML_SUCCESS;
}
ALSO(nvmlComputeInstanceGetInfo, "nvmlComputeInstanceGetInfo_v2", (nvmlComputeInstance_t, nvmlComputeInstanceInfo_t *));

nvmlReturn_t nvmlComputeInstanceDestroy(nvmlComputeInstance_t i) {
	ON(i, "Destroy", "%s", "");
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set) {
	NEED(set);
	LIBRARY("EventSetCreate", "%s", "");
	set->handle = handle("events");
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t d, unsigned long long types, nvmlEventSet_t set) {
	NEED(set.handle);
	ON(d, "RegisterEvents", "%llu,%s", types, NAME(set));
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned timeout) {
	NEED(set.handle);
	NEED(data);
	usleep(1000 * (useconds_t)timeout);
	return NVML_ERROR_TIMEOUT;
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) {
	NEED(set.handle);
	return NVML_SUCCESS;
}
