# Sourced by scripts that run PostgreSQL on a braidfs, behind lib.sh. They have `sql`, the database with pgbench's tables and a
# table `acknowledged`, and the numbers that were acknowledged in $WORK/acknowledged.
# shellcheck shell=bash

# Whether all that was acknowledged is there, and amcheck and pgbench's own sums find nothing; $last: how many.
nothing_is_missing() {
    local found damaged same
    last=$(tail -n 1 "$WORK/acknowledged")
    found=$(sql -c "select count(*) from acknowledged where id <= $last")
    [ "$found" = "$last" ] || die "$last inserts were acknowledged, $found are there after recovery"
    sql >"$WORK/amcheck" 2>&1 <<'SQL' || die "amcheck: $(cat "$WORK/amcheck")"
do $$
declare index regclass;
begin
    for index in select c.oid from pg_class c join pg_am a on a.oid = c.relam where a.amname = 'btree' and c.relkind = 'i'
    loop
        perform bt_index_parent_check(index, true);
    end loop;
end $$
SQL
    damaged=$(sql -c "select count(*) from pg_class c, lateral verify_heapam(c.oid) where c.relkind = 'r'")
    [ "$damaged" = 0 ] || die "amcheck: $damaged damaged tuples"
    same=$(sql -c "select (select sum(abalance) from pgbench_accounts) = (select sum(bbalance) from pgbench_branches) and (select sum(bbalance) from pgbench_branches) = (select sum(delta) from pgbench_history)")
    [ "$same" = t ] || die "pgbench's balances do not agree"
}
