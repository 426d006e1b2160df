#!/bin/busybox sh
# The first program of a guest: reach the host's files, lay a writable layer over them, go there.
b=/bin/busybox
$b mount -t proc none /proc
$b mount -t sysfs none /sys
$b mount -t devtmpfs none /dev
while read -r module; do $b insmod "/modules/$module" 2>/dev/null; done < /modules/order
share() { $b mount -t 9p -o "trans=virtio,version=9p2000.L,msize=262144,$3" "$1" "$2"; }
share host /host ro,cache=loose || { echo 'lab: the host cannot be reached'; $b poweroff -f; }
$b mount -t tmpfs none /over
$b mkdir /over/files /over/work
$b mount -t overlay -o lowerdir=/host,upperdir=/over/files,workdir=/over/work none /root ||
    { echo 'lab: no overlay'; $b poweroff -f; }
$b mkdir -p /root/lab
share run /root/lab rw,cache=none
for place in proc sys dev; do $b mount --move /$place /root/$place; done
$b mkdir -p /root/dev/shm /root/dev/pts
for place in dev/shm run; do $b mount -t tmpfs none /root/$place; done
$b mount -t devpts none /root/dev/pts
$b mount -t cgroup2 none /root/sys/fs/cgroup
$b mount -t bpf none /root/sys/fs/bpf
exec $b switch_root /root /bin/bash /lab/init.sh
