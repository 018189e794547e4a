/* A libdcmi.so whose NPUs do what the test says: DCMI_STUB="npus=8 lost3=1 hbm_double0=2" (key=number, per NPU with its number at
 * the end). What is not said is a healthy 910B3. Signatures as in dcmi_interface_api.h. */
#define STUB "DCMI_STUB"
#include "said.h"
#include <unistd.h>

enum { OK = 0, NOT_EXIST = -8008, NOT_SUPPORT = -8255 };

static long of(int card, const char *key, long otherwise) { return said_of(card, key, otherwise); }

#define ALIVE do { if (of(card, "lost", 0)) return NOT_EXIST; (void)device; } while (0)
#define GIVE(where, key, otherwise) do { long v_ = of(card, key, otherwise); if (v_ == -1) return NOT_SUPPORT; *(where) = v_; } while (0)

int dcmi_init(void) { return said("init", OK); }
int dcmi_get_card_list(int *n, int *cards, int room) {
    if (said("list", OK)) return said("list", OK);
    *n = 0;
    for (int card = 0; card < room && *n < said("npus", 2); card++) cards[(*n)++] = card;
    return OK;
}
int dcmi_get_device_id_in_card(int card, int *chips, int *mcu, int *cpu) { (void)card; *chips = said("chips", 1); *mcu = *chips; *cpu = -1; return OK; }
int dcmi_get_device_logic_id(int *id, int card, int device) { *id = card * said("chips", 1) + device; return OK; }
struct chip { char type[32], name[32], version[32]; unsigned cores; };
int dcmi_get_device_chip_info(int card, int device, struct chip *c) {
    ALIVE;
    memset(c, 0, sizeof *c);
    strcpy(c->type, "Ascend"); strcpy(c->name, of(card, "virtual", 0) ? "310P3vir04" : "910B3"); strcpy(c->version, "V1");
    return OK;
}
int dcmi_get_device_die_v2(int card, int device, int kind, unsigned *die) { ALIVE; if (kind != 1) return NOT_SUPPORT; for (int i = 0; i < 5; i++) die[i] = 0xA0000000u + 16 * card + device; return OK; }
struct pcie { unsigned ids[4]; int domain; unsigned bus, device, function; unsigned char reserve[32]; };
int dcmi_get_device_pcie_info_v2(int card, int device, struct pcie *p) { ALIVE; memset(p, 0, sizeof *p); p->bus = 0xc1 + card; return OK; }
int dcmi_get_device_health(int card, int device, unsigned *h) { (void)device; if (of(card, "gone", 0)) { *h = ~0u; return OK; } ALIVE; GIVE(h, "health", 0); return OK; }
int dcmi_get_device_errorcode_v2(int card, int device, int *n, unsigned *codes, unsigned room) {
    ALIVE;
    *n = 0;
    if (room < 2) return -8001;
    if (of(card, "code", 0)) codes[(*n)++] = of(card, "code", 0);
    if (of(card, "other", 0)) codes[(*n)++] = of(card, "other", 0);
    return OK;
}
int dcmi_get_device_temperature(int card, int device, int *t) { ALIVE; GIVE(t, "heat", 42); return OK; }
int dcmi_get_device_power_info(int card, int device, int *p) { ALIVE; GIVE(p, "power", 953); return OK; }
struct ecc { int enabled; unsigned counts[8]; };
int dcmi_get_device_ecc_info(int card, int device, int kind, struct ecc *e) {
    ALIVE;
    if (kind != 2) return NOT_SUPPORT;
    memset(e, 0, sizeof *e);
    e->enabled = 1;
    GIVE(&e->counts[0], "hbm_single", 0); GIVE(&e->counts[1], "hbm_double", 0); GIVE(&e->counts[3], "hbm_double_life", 0);
    GIVE(&e->counts[5], "pages", 0); GIVE(&e->counts[7], "pages_next", 0);
    return OK;
}
struct hbm { unsigned long long size; unsigned frequency; unsigned long long used; int heat; unsigned bandwidth; };
int dcmi_get_device_hbm_info(int card, int device, struct hbm *h) { ALIVE; memset(h, 0, sizeof *h); GIVE(&h->heat, "hbm_heat", 44); return OK; }
struct hccs { unsigned sent[16], received[16], crc[16], retries[16], reserved[64]; };
int dcmi_get_device_info(int card, int device, int command, unsigned sub, void *buffer, unsigned *size) {
    ALIVE;
    if (command != 16 || sub != 3 || *size < sizeof(struct hccs)) return NOT_SUPPORT;
    memset(buffer, 0, sizeof(struct hccs));
    GIVE(&((struct hccs *)buffer)->crc[3], "crc", 0);
    return OK;
}
int dcmi_get_device_network_health(int card, int device, int *result) { ALIVE; usleep(1000 * of(card, "network_ms", 0)); GIVE(result, "network", 0); return OK; }
