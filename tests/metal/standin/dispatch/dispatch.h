/* Only dispatch_data_t: an object with a copy of the bytes. */
#ifndef STANDIN_DISPATCH_H
#define STANDIN_DISPATCH_H
#import <Foundation/Foundation.h>

@protocol OS_dispatch_data <NSObject>
@end
typedef NSObject<OS_dispatch_data> *dispatch_data_t;
#define DISPATCH_DATA_DESTRUCTOR_DEFAULT NULL
#define OS_OBJECT_USE_OBJC               1
#define dispatch_release(object)         [(object) release]
dispatch_data_t dispatch_data_create(const void *bytes, size_t size, void *queue, void *destructor) NS_RETURNS_RETAINED;

#endif
