/* What: three names of newer C libraries, for the library of the wheel (TALEA_PORTABLE).
 * Why: GCC 12's static libstdc++ asks for them, and a system with glibc 2.28 has none of the three.
 * Never: exported; declared by a system header here, which would choose another definition. */
typedef unsigned int u32;

extern int __fxstat64(int version, int file, void* status);
extern int getentropy(void* buffer, unsigned long bytes);
extern void abort(void) __attribute__((noreturn));

/* glibc 2.32: whether the process has one thread only. "No" is always safe: counts stay atomic. */
char __libc_single_threaded = 0;

/* glibc 2.33: until then a macro of the header; 1 is the layout of x86-64's struct. */
int fstat64(int file, void* status) { return __fxstat64(1, file, status); }

/* glibc 2.36: behind std::random_device, which this library does not use. */
u32 arc4random(void) {
  u32 number = 0;
  if (getentropy(&number, sizeof number) != 0) abort();
  return number;
}
