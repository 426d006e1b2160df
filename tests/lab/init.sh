# Runs in a guest as process 1, on the host's files: set the network up, run /lab/commands, end.
# /lab is the guest's own directory on the host: what to run, its settings, its exit status.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
. /lab/settings
hostname "$NAME"
ln -sf /proc/self/fd /dev/fd
ip link set lo up
if [ -n "$NUMBER" ]; then
    for wire in 0 1 2; do
        ip link set eth$wire mtu "$MTU" up
        ip addr add 10.9.$wire.$NUMBER/24 dev eth$wire
    done
fi
modules() { for module in "$@"; do modprobe -d "$KERNEL" "$module" || echo "lab: no $module"; done; }
# rxe NUMBER INTERFACE: make the device rxeNUMBER and its node; this system has no udev.
rxe() {
    rdma link add "rxe$1" type rxe netdev "$2"
    mkdir -p /dev/infiniband
    for node in /sys/class/infiniband_verbs/uverbs*; do
        path=/dev/infiniband/${node##*/}
        [ -e "$path" ] || mknod "$path" c $(tr : ' ' < "$node/dev")
    done
}
# cable NUMBER on|off: put the cable of an interface in or pull it out; its carrier tells when.
cable() {
    echo "lab: cable $1 $2" > /dev/ttyS0
    for _ in $(seq 100); do
        case $2-$(cat "/sys/class/net/eth$1/carrier") in on-1 | off-0) return ;; esac
        sleep 0.05
    done
    return 1
}
export -f modules rxe cable
modules crc32_generic crc32_pclmul rdma_rxe ib_uverbs smc smc_diag
ulimit -l unlimited
mkdir -m 700 -p "$XDG_RUNTIME_DIR"
cd "$REPOSITORY"
echo 'lab: up'
setsid bash /lab/commands < /dev/null 2>&1
echo $? > /lab/status
mkdir -p /lab/keep
dmesg > "/lab/keep/dmesg-$NAME"
# Warnings with a stack have a level that the console does not show.
dmesg | grep -E 'WARNING: |BUG: |Oops|refcount_t' | sed 's/^/kernel log: /'
dmesg --level=emerg,alert,crit,err | tail -n 20 | sed 's/^/kernel: /'
sync
echo b > /proc/sysrq-trigger # at once; an orderly end waits seconds for soft-RoCE
sleep 9
