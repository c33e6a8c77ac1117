/* A library with NVML's functions, which says what a text file says; NVML_FAKE names the file;
 * without it, `gpus.txt` beside the library does.
 *
 * Lines: `hang`, `crash`, `fail CODE` (nvmlInit), `gpu PCI KEY=VALUE...`.  Compiled by the tests.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define GPUS 16
#define NOT_SUPPORTED 3
#define FUNCTION_ABSENT -1

struct gpu {
    char pci[32];
    int error, pending, failed, sram, recovery, ecc, links, nvlink_errors, slowdown;
    int use, memory, temperature, watts, energy, replays; /* -1: the GPU does not say */
};
static struct gpu gpus[GPUS];
static unsigned count;
static int init_error;

static int value(const char *line, const char *key, int missing) {
    const char *found = strstr(line, key);
    return found ? atoi(found + strlen(key)) : missing;
}

static FILE *description(void) {
    const char *path = getenv("NVML_FAKE");
    char beside[4096];
    Dl_info library;
    if (!path && dladdr((void *)&count, &library)) {
        const char *slash = strrchr(library.dli_fname, '/');
        int folder = slash ? (int)(slash - library.dli_fname) + 1 : 0;
        snprintf(beside, sizeof beside, "%.*sgpus.txt", folder, library.dli_fname);
        path = beside;
    }
    return path ? fopen(path, "r") : NULL;
}

static void load(void) {
    FILE *file = description();
    char line[512];
    count = 0;
    init_error = file ? 0 : 9; /* NVML_ERROR_DRIVER_NOT_LOADED */
    while (file && fgets(line, sizeof line, file)) {
        if (!strncmp(line, "hang", 4)) pause();
        if (!strncmp(line, "crash", 5)) raise(SIGSEGV);
        if (!strncmp(line, "fail ", 5)) init_error = atoi(line + 5);
        if (!strncmp(line, "gpu ", 4) && count < GPUS) {
            struct gpu *gpu = &gpus[count++];
            sscanf(line + 4, "%31s", gpu->pci);
            gpu->error = value(line, "error=", 0);
            gpu->pending = value(line, "pending=", 0);
            gpu->failed = value(line, "failed=", 0);
            gpu->sram = value(line, "sram=", 0);
            gpu->recovery = value(line, "recovery=", -1);
            gpu->ecc = value(line, "ecc=", -1);
            gpu->links = value(line, "links=", -1);
            gpu->nvlink_errors = value(line, "nvlink_errors=", 0);
            gpu->slowdown = value(line, "slowdown=", 0);
            gpu->use = value(line, "use=", -1);
            gpu->memory = value(line, "memory=", -1);
            gpu->temperature = value(line, "temperature=", -1);
            gpu->watts = value(line, "watts=", -1);
            gpu->energy = value(line, "energy=", -1);
            gpu->replays = value(line, "replays=", -1);
        }
    }
    if (file) fclose(file);
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; load(); return init_error; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { (void)code; return "fake error"; }
int nvmlDeviceGetCount_v2(unsigned *found) { *found = count; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct gpu **found) {
    *found = &gpus[index];
    return 0;
}

/* As nvmlPciInfo_t of nvml.h. */
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };
int nvmlDeviceGetPciInfo_v3(struct gpu *gpu, struct pci *found) {
    memset(found, 0, sizeof *found);
    strcpy(found->bus_id, gpu->pci);
    return 0;
}
int nvmlDeviceGetRemappedRows(struct gpu *gpu, unsigned *corrected, unsigned *uncorrected,
                              unsigned *pending, unsigned *failed) {
    *corrected = *uncorrected = 0;
    *pending = (unsigned)gpu->pending;
    *failed = (unsigned)gpu->failed;
    return gpu->error;
}
int nvmlDeviceGetTotalEccErrors(struct gpu *gpu, int type, int counter, unsigned long long *found) {
    (void)counter;
    if (gpu->ecc < 0) return NOT_SUPPORTED;
    *found = type == 1 ? (unsigned long long)gpu->ecc : 7;
    return 0;
}

/* As nvmlEccSramErrorStatus_v1_t of nvml.h. */
struct sram { unsigned version; unsigned long long counts[11]; unsigned is_over; };
int nvmlDeviceGetSramEccErrorStatus(struct gpu *gpu, struct sram *status) {
    if (status->version != 0x1000068) return 25; /* NVML_ERROR_ARGUMENT_VERSION_MISMATCH */
    status->is_over = (unsigned)gpu->sram;
    return 0;
}
int nvmlDeviceGetNvLinkState(struct gpu *gpu, unsigned link, unsigned *is_up) {
    if (gpu->links < 0 || link >= 18) return 2; /* NVML_ERROR_INVALID_ARGUMENT */
    *is_up = link < (unsigned)gpu->links;
    return 0;
}
int nvmlDeviceGetNvLinkErrorCounter(struct gpu *gpu, unsigned link, int counter,
                                    unsigned long long *found) {
    *found = link == 0 && counter == 0 ? (unsigned long long)gpu->nvlink_errors : 0;
    return 0;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(struct gpu *gpu, unsigned long long *found) {
    *found = (unsigned long long)gpu->slowdown;
    return 0;
}

/* As nvmlFieldValue_t of nvml.h. */
struct field {
    uint32_t id, scope;
    int64_t timestamp, latency;
    int type, code;
    union { unsigned number; double other; } value;
};
int nvmlDeviceGetFieldValues(struct gpu *gpu, int wanted, struct field *fields) {
    for (int i = 0; i < wanted; i++) {
        int is_heat = fields[i].id == 82; /* NVML_FI_DEV_MEMORY_TEMP */
        int number = is_heat ? gpu->temperature : fields[i].id == 230 ? gpu->recovery : -1;
        fields[i].code = number >= 0 ? 0 : NOT_SUPPORTED;
        fields[i].value.number = (unsigned)number;
    }
    return 0;
}

/* Values that are only shown: https://docs.nvidia.com/deploy/nvml-api has their units. */
int nvmlDeviceGetUUID(struct gpu *gpu, char *found, unsigned length) {
    snprintf(found, length, "GPU-%.31s", gpu->pci);
    return gpu->error;
}
int nvmlDeviceGetName(struct gpu *gpu, char *found, unsigned length) {
    snprintf(found, length, "NVIDIA H100 80GB HBM3");
    return gpu->error;
}
int nvmlDeviceGetUtilizationRates(struct gpu *gpu, unsigned found[2]) {
    if (gpu->use < 0) return NOT_SUPPORTED;
    found[0] = (unsigned)gpu->use;
    found[1] = (unsigned)gpu->use / 2;
    return gpu->error;
}
int nvmlDeviceGetTemperature(struct gpu *gpu, int sensor, unsigned *found) {
    if (gpu->temperature < 0 || sensor) return NOT_SUPPORTED;
    *found = (unsigned)gpu->temperature;
    return gpu->error;
}
int nvmlDeviceGetPowerUsage(struct gpu *gpu, unsigned *milliwatts) {
    if (gpu->watts < 0) return NOT_SUPPORTED;
    *milliwatts = (unsigned)gpu->watts * 1000;
    return gpu->error;
}
int nvmlDeviceGetClockInfo(struct gpu *gpu, int clock, unsigned *megahertz) {
    if (gpu->watts < 0) return NOT_SUPPORTED;
    *megahertz = clock == 1 ? 1980 : 2619; /* NVML_CLOCK_SM, NVML_CLOCK_MEM */
    return gpu->error;
}
int nvmlDeviceGetTotalEnergyConsumption(struct gpu *gpu, unsigned long long *millijoules) {
    if (gpu->energy < 0) return NOT_SUPPORTED;
    *millijoules = (unsigned long long)gpu->energy;
    return gpu->error;
}
int nvmlDeviceGetPcieReplayCounter(struct gpu *gpu, unsigned *found) {
    if (gpu->replays < 0) return NOT_SUPPORTED;
    *found = (unsigned)gpu->replays;
    return gpu->error;
}
/* As nvmlMemory_v2_t of nvml.h; `memory` is in MiB. */
struct memory { unsigned version; unsigned long long total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(struct gpu *gpu, struct memory *found) {
    if (gpu->memory < 0) return NOT_SUPPORTED;
    if (found->version != 0x2000028) return 25; /* NVML_ERROR_ARGUMENT_VERSION_MISMATCH */
    found->total = 81559ULL << 20;
    found->reserved = 559ULL << 20;
    found->used = (unsigned long long)gpu->memory << 20;
    found->free = found->total - found->reserved - found->used;
    return gpu->error;
}
