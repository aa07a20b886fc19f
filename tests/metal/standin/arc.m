/* The functions that code under ARC calls, on top of gcc's runtime, which has none: tqkv_metal.m built with -fobjc-arc
   runs on Linux. clang supports ARC for GNUstep's runtime alone; the functions of that runtime that its objects call
   are here too. */
#import <Foundation/Foundation.h>
#include <dlfcn.h>
#include <objc/message.h>

id objc_retain(id object);
void objc_release(id object);
id objc_retainAutoreleasedReturnValue(id object);
id objc_autoreleaseReturnValue(id object);
void objc_storeStrong(id *at, id object);

id objc_retain(id object) { return [object retain]; }
void objc_release(id object) { [object release]; }
id objc_retainAutoreleasedReturnValue(id object) { return [object retain]; }
id objc_autoreleaseReturnValue(id object) { return [object autorelease]; }

void objc_storeStrong(id *at, id object)
{
    id before = *at;
    *at = [object retain];
    [before release];
}

/* A method in the layout of GNUstep's runtime. */
typedef struct objc_slot {
    Class owner, cached_for;
    const char *types;
    int version;
    IMP method;
} objc_slot;

objc_slot *objc_msg_lookup_sender(id *receiver, SEL selector, id sender);
objc_slot *objc_msg_lookup_sender(id *receiver, SEL selector, id sender)
{
    static __thread objc_slot slot;
    (void)sender;
    slot.method = objc_msg_lookup(*receiver, selector);
    return &slot;
}

/* The module of an object file. For a file without classes, GNUstep's layout differs from gcc's in version and size. */
typedef struct objc_module {
    unsigned long version, size;
    const char *name;
    void *symbols;
} objc_module;

void __objc_exec_class(objc_module *module);
void __objc_exec_class(objc_module *module)
{
    void (*load)(objc_module *) = (void (*)(objc_module *))dlsym(RTLD_NEXT, "__objc_exec_class");
    module->version = 8;
    module->size = sizeof *module;
    load(module);
}
