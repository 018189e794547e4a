/* What the stand-ins of vendors' libraries share: the test says by the environment variable STUB what their devices do,
 * "key=number key=number"; `key3` is device 3's own. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static long said(const char *key, long otherwise) {
    const char *at = getenv(STUB);
    size_t length = strlen(key);
    while (at && *at) {
        while (*at == ' ') at++;
        if (!strncmp(at, key, length) && at[length] == '=') return strtol(at + length + 1, NULL, 0);
        at = strchr(at, ' ');
    }
    return otherwise;
}

static long said_of(long device, const char *key, long otherwise) {
    char whole[64];
    snprintf(whole, sizeof whole, "%s%ld", key, device);
    return said(whole, said(key, otherwise));
}
