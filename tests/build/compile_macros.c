/* The implementation after the macros of other headers, as they stand there;
 * what the implementation includes came before. */
#include <fenv.h>
#include <limits.h>
#include <math.h>
#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#define XXH_INLINE_ALL
#include <xxhash.h>
#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>
#endif

/* Qt: qobjectdefs.h, qglobal.h */
#define slots
#define signals public
#define emit
#define foreach(variable, container) for (;;)
#define forever                      for (;;)

/* windows.h and what it includes: minwindef.h, rpcndr.h, wingdi.h, winerror.h, winnt.h, combaseapi.h,
 * commdlg.h, dlgs.h */
#define near
#define far
#define NEAR
#define FAR
#define small     char
#define hyper     long
#define interface struct
#define pascal
#define cdecl
#define IN
#define OUT
#define OPTIONAL
#define CONST const
#define VOID  void
#define THIS
#define PURE            = 0
#define ERROR           0
#define NO_ERROR        0
#define DELETE          0x10000
#define TRUE            1
#define FALSE           0
#define STRICT          1
#define ABSOLUTE        1
#define RELATIVE        2
#define TRANSPARENT     1
#define OPAQUE          2
#define BACKGROUND_BLUE 0x10
#define min(a, b)       (((a) < (b)) ? (a) : (b))
#define max(a, b)       (((a) > (b)) ? (a) : (b))
#define RGB(r, g, b)    (0)
#define grp1            0x430
#define rad1            0x420
#define psh1            0x400
#define stc1            0x440
#define lst1            0x460
#define edt1            0x480
#define environ         0
#define unix_           0

/* X11: X.h, Xlib.h, Xutil.h */
#define None        0L
#define Always      2
#define Bool        int
#define Status      int
#define True        1
#define False       0
#define Success     0
#define Above       0
#define Below       1
#define Complex     0
#define Convex      2
#define Unsorted    0
#define KeyPress    2
#define FocusIn     9
#define FocusOut    10
#define Expose      12
#define CursorShape 0
#define Button1     1
#define XValue      1
#define YValue      2
#define AllValues   15

/* Arduino: Arduino.h, binary.h, Print.h, pgmspace.h */
#define F(text)                 (text)
#define bit(b)                  (1UL << (b))
#define sq(x)                   ((x) * (x))
#define radians(degrees)        ((degrees)*0.01745)
#define degrees(radians)        ((radians)*57.29)
#define constrain(x, low, high) ((x) < (low) ? (low) : (x) > (high) ? (high) : (x))
#define lowByte(w)              ((uint8_t)((w)&0xff))
#define highByte(w)             ((uint8_t)((w) >> 8))
#define bitRead(value, bit)     (((value) >> (bit)) & 0x01)
#define bitSet(value, bit)      ((value) |= (1UL << (bit)))
#define bitClear(value, bit)    ((value) &= ~(1UL << (bit)))
#define interrupts()            0
#define noInterrupts()          0
#undef round
#undef abs
#define round(x) ((x) >= 0 ? (long)((x) + 0.5) : (long)((x)-0.5))
#define abs(x)   ((x) > 0 ? (x) : -(x))
#define HIGH     1
#define LOW      0
#define INPUT    0
#define OUTPUT   1
#define CHANGE   1
#define FALLING  2
#define RISING   3
#define DEFAULT  1
#define EXTERNAL 0
#define INTERNAL 3
#define SERIAL   0
#define DISPLAY  1
#define PI       3.14159
#define EULER    2.71828
#define DEC      10
#define HEX      16
#define OCT      8
#define BIN      2
#define B0       0
#define B1       1
#define A0       14
#define PROGMEM

#include "tqkv_metal.m"
