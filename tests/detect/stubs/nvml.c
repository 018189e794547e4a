/* A libnvidia-ml.so.1 whose GPUs do what the test says: NVML_STUB="gpus=8 lost3=1 ecc_unc0=2" (key=number, per GPU with its
 * number at the end). What is not said is a healthy H200. Loaded under the real nvidia-ml-py. */
#define STUB "NVML_STUB"
#include "said.h"

typedef int ret;
typedef void *dev;
typedef unsigned int u32;
typedef unsigned long long u64;
enum { OK, UNINITIALIZED, INVALID, NOT_SUPPORTED, NO_PERMISSION, INSUFFICIENT_SIZE = 7, TIMEOUT = 10, LOST = 15, VERSION = 25 };

static long of(dev d, const char *key, long otherwise) { return said_of((long)d - 1, key, otherwise); }

static ret state(dev d) { return of(d, "lost", 0) ? LOST : (ret)of(d, "error", OK); }
#define ALIVE(d) do { ret r_ = state(d); if (r_) return r_; } while (0)
#define GIVE(where, key, otherwise) do { long v_ = of(d, key, otherwise); if (v_ == -1) return NOT_SUPPORTED; *(where) = v_; } while (0)

ret nvmlInitWithFlags(u32 flags) { (void)flags; return said("init", OK); }
ret nvmlInit_v2(void) { return said("init", OK); }
ret nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(ret r) {
    return r == LOST ? "GPU is lost" : r == 18 ? "Driver/library version mismatch" : r == 9 ? "Driver Not Loaded" : "stub error";
}
ret nvmlDeviceGetCount_v2(u32 *n) { *n = said("gpus", 2); return OK; }
ret nvmlDeviceGetHandleByIndex_v2(u32 i, dev *d) {
    char key[32];
    long skipped = 0;
    for (u32 real = 0; real < 64; real++) { /* gone3=1: counted anew without number 3 */
        snprintf(key, sizeof key, "gone%u", real);
        if (said(key, 0)) skipped++;
        else if (real - skipped == i) { *d = (dev)(long)(real + 1); return of(*d, "handle", OK); }
    }
    return INVALID;
}
ret nvmlDeviceGetName(dev d, char *b, u32 n) { ALIVE(d); snprintf(b, n, "NVIDIA H200"); return OK; }
ret nvmlDeviceGetUUID(dev d, char *b, u32 n) { ALIVE(d); snprintf(b, n, "GPU-5d0ac2a1-0000-0000-0000-00000000000%ld", (long)d - 1); return OK; }
ret nvmlDeviceGetSerial(dev d, char *b, u32 n) { ALIVE(d); snprintf(b, n, "165402300010%ld", (long)d - 1); return OK; }
ret nvmlDeviceGetVbiosVersion(dev d, char *b, u32 n) { ALIVE(d); snprintf(b, n, "96.00.BC.00.%02lx", of(d, "vbios", 1)); return OK; }
struct pci { char old[16]; u32 domain, bus, device, id, subsystem; char bus_id[32]; };
ret nvmlDeviceGetPciInfo_v3(dev d, struct pci *p) {
    ALIVE(d);
    memset(p, 0, sizeof *p);
    snprintf(p->bus_id, sizeof p->bus_id, "00000000:%02lX:00.0", 0x19 + (long)d);
    return OK;
}
ret nvmlDeviceGetMigMode(dev d, u32 *now, u32 *then) { ALIVE(d); GIVE(now, "mig", 0); GIVE(then, "mig_pending", *now); return OK; }
ret nvmlDeviceGetEccMode(dev d, u32 *now, u32 *then) { ALIVE(d); GIVE(now, "ecc", 1); GIVE(then, "ecc_pending", *now); return OK; }
ret nvmlDeviceGetVirtualizationMode(dev d, u64 *mode) { ALIVE(d); GIVE(mode, "virtual", 0); return OK; }
ret nvmlDeviceGetTotalEccErrors(dev d, int kind, int counter, u64 *n) {
    ALIVE(d);
    if (of(d, "mig", 0) && counter == 0) return NOT_SUPPORTED;
    GIVE(n, kind ? (counter ? "ecc_unc_agg" : "ecc_unc") : (counter ? "ecc_cor_agg" : "ecc_cor"), 0);
    return OK;
}
ret nvmlDeviceGetRemappedRows(dev d, u32 *cor, u32 *unc, u32 *pending, u32 *failed) {
    ALIVE(d);
    GIVE(cor, "rows_cor", 0); GIVE(unc, "rows_unc", 0); GIVE(pending, "rows_pending", 0); GIVE(failed, "rows_failed", 0);
    return OK;
}
struct sram { u32 version; u64 counts[11]; u32 exceeded; };
ret nvmlDeviceGetSramEccErrorStatus(dev d, struct sram *s) {
    ALIVE(d);
    if (s->version != 0x1000068 || sizeof *s != 0x68) return VERSION;
    memset(s->counts, 0, sizeof s->counts);
    GIVE(&s->counts[0], "sram_parity", 0); GIVE(&s->exceeded, "sram_exceeded", 0);
    return OK;
}
ret nvmlDeviceGetRetiredPagesPendingStatus(dev d, u32 *p) { ALIVE(d); GIVE(p, "pages_pending", -1); return OK; }
ret nvmlDeviceValidateInforom(dev d) { ALIVE(d); return of(d, "inforom", OK); }
ret nvmlDeviceGetPersistenceMode(dev d, u32 *m) { ALIVE(d); GIVE(m, "persistence", 1); return OK; }
ret nvmlDeviceGetPcieReplayCounter(dev d, u32 *n) { ALIVE(d); GIVE(n, "replays", 0); return OK; }
ret nvmlDeviceGetCurrPcieLinkWidth(dev d, u32 *n) { ALIVE(d); GIVE(n, "width", 16); return OK; }
ret nvmlDeviceGetMaxPcieLinkWidth(dev d, u32 *n) { ALIVE(d); *n = 16; return OK; }
ret nvmlDeviceGetCurrPcieLinkGeneration(dev d, u32 *n) { ALIVE(d); GIVE(n, "generation", 5); return OK; }
ret nvmlDeviceGetMaxPcieLinkGeneration(dev d, u32 *n) { ALIVE(d); *n = 5; return OK; }
ret nvmlDeviceGetCurrentClocksEventReasons(dev d, u64 *r) { ALIVE(d); GIVE(r, "reasons", 0); return OK; }
ret nvmlDeviceGetClockInfo(dev d, int kind, u32 *mhz) { (void)kind; ALIVE(d); GIVE(mhz, "clock", 1980); return OK; }
ret nvmlDeviceGetMaxClockInfo(dev d, int kind, u32 *mhz) { (void)kind; ALIVE(d); *mhz = 1980; return OK; }
struct load { u32 gpu, memory; };
ret nvmlDeviceGetUtilizationRates(dev d, struct load *l) { ALIVE(d); if (of(d, "mig", 0)) return NOT_SUPPORTED; l->memory = 0; GIVE(&l->gpu, "load", 50); return OK; }
ret nvmlDeviceGetTemperature(dev d, int sensor, u32 *t) { (void)sensor; ALIVE(d); GIVE(t, "heat", 45); return OK; }
ret nvmlDeviceGetTemperatureThreshold(dev d, int kind, u32 *t) { ALIVE(d); if (kind > 2) return NOT_SUPPORTED; *t = kind == 0 ? 92 : kind == 1 ? 89 : 95; return OK; }
struct margin { u32 version; int margin; };
ret nvmlDeviceGetMarginTemperature(dev d, struct margin *m) { ALIVE(d); GIVE(&m->margin, "margin", -1); return OK; }
ret nvmlDeviceGetPowerUsage(dev d, u32 *mw) { ALIVE(d); GIVE(mw, "power", 350000); return OK; }
ret nvmlDeviceGetEnforcedPowerLimit(dev d, u32 *mw) { ALIVE(d); *mw = 700000; return OK; }
struct fabric { u32 version; unsigned char cluster[16]; ret status; u32 clique; unsigned char state; u32 health; unsigned char summary; };
ret nvmlDeviceGetGpuFabricInfoV(dev d, struct fabric *f) {
    ALIVE(d);
    if (f->version >> 24 == 3 && !said("fabric_v3", 0)) return VERSION; /* an older driver */
    long fabric = of(d, "fabric", 3);
    if (fabric < 0) return NOT_SUPPORTED;
    memset(f->cluster, said("cluster", 0), sizeof f->cluster);
    f->status = of(d, "fabric_status", 0); f->clique = 0; f->state = fabric; f->health = of(d, "fabric_health", 0x6aa);
    if (f->version >> 24 == 3) f->summary = of(d, "fabric_summary", 1);
    return OK;
}
struct process { u32 pid; u64 memory; u32 instance, compute; };
ret nvmlDeviceGetComputeRunningProcesses_v3(dev d, u32 *n, struct process *p) {
    ALIVE(d);
    long pid = of(d, "pid", 0);
    if (!pid) { *n = 0; return OK; }
    if (!p) { *n = 1; return INSUFFICIENT_SIZE; }
    *n = 1; p->pid = pid; p->memory = 3ULL << 30; p->instance = p->compute = ~0u;
    return OK;
}
struct field { u32 id, scope; long long stamp, latency; int type; ret result; union { double d; u64 u; long long s; } value; };
ret nvmlDeviceGetFieldValues(dev d, int n, struct field *f) {
    char key[32];
    ALIVE(d);
    for (; n--; f++) {
        long otherwise = f->id == 91 ? 18 : f->id == 165 ? 1 : f->id == 82 ? 50 : f->id == 29 || f->id == 30 || f->id >= 200 ? -1 : 0;
        if (f->id == 230) otherwise = 0;
        if (said("old_driver", 0) && f->id >= 161) otherwise = -2;
        snprintf(key, sizeof key, "f%u_%u_", f->id, f->scope);
        long value = of(d, key, otherwise);
        f->type = f->id == 230 ? 1 : 3;
        f->result = value == -1 ? NOT_SUPPORTED : value == -2 ? INVALID : OK;
        f->value.u = value;
    }
    return OK;
}
ret nvmlDeviceGetNvLinkState(dev d, u32 link, u32 *up) { char key[32]; ALIVE(d); snprintf(key, sizeof key, "link_%u_", link); GIVE(up, key, 1); return OK; }
ret nvmlDeviceGetNvLinkErrorCounter(dev d, u32 link, int counter, u64 *n) { (void)link; ALIVE(d); GIVE(n, counter == 0 ? "nvl_replay" : "nvl_other", 0); return OK; }

/* Events: event_set=GPU:XID is told once for every change of the variable. */
static int told;
ret nvmlEventSetCreate(dev *set) { *set = &told; return OK; }
ret nvmlEventSetFree(dev set) { (void)set; return OK; }
ret nvmlDeviceRegisterEvents(dev d, u64 types, dev set) { (void)types; (void)set; ALIVE(d); return of(d, "events", OK); }
struct event { dev device; u64 type, data; u32 instance, compute; };
ret nvmlEventSetWait_v2(dev set, struct event *e, u32 ms) {
    (void)set; (void)ms;
    if (said("wait_error", 0)) return said("wait_error", 0);
    if (said("event", 0) == told) return TIMEOUT;
    told = said("event", 0);
    e->device = (dev)(said("event_gpu", 0) + 1); e->type = 8; e->data = said("xid", 0); e->instance = e->compute = ~0u;
    return OK;
}
