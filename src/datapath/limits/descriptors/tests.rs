//! Shares of the pool under floods of connections.

use super::*;

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn peer(listener: &Arc<ListenerReserve>, cluster: &str, principal: &str) -> Holders {
    let source = listener.source(ip("192.0.2.1"));
    source.for_identity(&cluster.into(), &principal.into())
}

/// Takes descriptors for tunnels until the holder is rejected.
fn fill(holders: &Holders) -> Vec<TunnelDescriptor> {
    std::iter::from_fn(|| Some(holders.dial().ok()?.connected())).collect()
}

#[test]
fn a_lone_identity_takes_half_and_a_lone_cluster_two_thirds() {
    let pool = DescriptorPool::new(1200);
    let listener = pool.register_listener();
    let first = fill(&peer(&listener, "west", "a"));
    assert_eq!(first.len(), 600);
    let others: Vec<_> =
        (0..5).map(|at| fill(&peer(&listener, "west", &format!("b{at}")))).collect();
    let all = first.len() + others.iter().map(Vec::len).sum::<usize>();
    assert!((780..=840).contains(&all), "{all}");
    let quiet = fill(&peer(&listener, "north", "c"));
    assert!(quiet.len() >= 150, "{}", quiet.len());
    drop((first, others, quiet));
    let usage = pool.pool.usage(10);
    assert_eq!((usage.used, usage.max, usage.holders), (0, Some(1200), Vec::new()));
}

#[test]
fn tunnels_of_an_identity_are_counted_until_they_end_and_connections_are_not() {
    let pool = DescriptorPool::new(1200);
    let listener = pool.register_listener();
    let (one, same) = (peer(&listener, "west", "a"), peer(&listener, "west", "a"));
    let connection = one.connection().expect("room");
    assert_eq!(pool.tunnels(), []);
    let tunnels = [one.dial(), same.dial()];
    assert_eq!(pool.tunnels(), [("a".into(), 2)]);
    drop((connection, tunnels));
    assert_eq!(pool.tunnels(), []);
}

#[test]
fn a_quiet_identity_of_a_busy_cluster_and_a_quiet_source_get_in() {
    let pool = DescriptorPool::new(1200);
    let (hbone, tls) = (pool.register_listener(), pool.register_listener());
    let mut held: Vec<_> =
        (0..20).flat_map(|at| fill(&peer(&hbone, "west", &format!("busy{at}")))).collect();
    held.extend((0..4).flat_map(|at| fill(&tls.source([10, 0, 0, at].into()))));
    let quiet = peer(&hbone, "west", "quiet").connection();
    let source = tls.source(ip("192.0.2.9")).connection();
    assert!(quiet.is_ok() && source.is_ok(), "{quiet:?} {source:?}");
}

#[test]
fn connections_that_no_listener_has_accepted_leave_the_parts_of_listeners() {
    let pool = DescriptorPool::new(1600);
    let hbone = pool.register_listener();
    let sources = (0..u32::MAX).map(|at| Source::prefix(IpAddr::V4(at.into())));
    let mut held = Vec::new();
    for source in sources {
        let Ok(taken) = pool.pool.account(&source).take(1) else { break };
        held.push(taken);
    }
    assert_eq!(held.len(), 1500, "all but a sixteenth");
    assert!(hbone.has_free_descriptor());
    assert!(peer(&hbone, "west", "a").connection().is_ok());
}

#[test]
fn the_clients_of_one_listener_leave_the_part_of_another() {
    let pool = DescriptorPool::new(1600);
    let (tls, hbone) = (pool.register_listener(), pool.register_listener());
    // As many addresses as needed; each takes no more than `Resource::Descriptors.floor()`.
    let floods = (0..u32::MAX).map(|at| tls.source(IpAddr::V4(at.into())));
    let mut held = Vec::new();
    for source in floods {
        let taken: Vec<_> =
            (0..Resource::Descriptors.floor()).map_while(|_| source.connection().ok()).collect();
        if taken.is_empty() {
            break;
        }
        held.extend(taken);
    }
    assert_eq!(held.len(), 1500, "all but a sixteenth");
    assert!(!tls.has_free_descriptor() && hbone.has_free_descriptor());
    assert!(fill(&peer(&hbone, "west", "a")).len() >= Resource::Descriptors.floor());
    drop(hbone);
    assert!(tls.has_free_descriptor(), "what was reserved is free without the listener");
}

#[test]
fn a_listener_that_drains_keeps_its_connections_and_no_reserve() {
    let pool = DescriptorPool::new(1600);
    let (old, new) = (pool.register_listener(), pool.register_listener());
    let open = peer(&old, "west", "a").connection().expect("room");
    assert_eq!(new.free(), 1600 - 1 - 99, "the rest of a sixteenth");
    old.release();
    assert_eq!(new.free(), 1600 - 1);
    drop(old);
    assert!(open.holders().dial().is_ok(), "it goes on");
}

#[test]
fn many_identities_of_one_cluster_leave_a_quarter_to_others() {
    let pool = DescriptorPool::new(1600);
    let listener = pool.register_listener();
    let held: Vec<_> = (0..1600)
        .map_while(|at| peer(&listener, "unlisted", &format!("i{at}")).connection().ok())
        .collect();
    assert!(held.len() <= 1200, "{}", held.len());
    assert!(peer(&listener, "west", "a").connection().is_ok());
}

#[test]
fn a_connection_is_handed_over_from_its_address_to_its_identity() {
    let pool = DescriptorPool::new(100);
    let listener = pool.register_listener();
    let mut connection = listener.source(ip("2001:db8::1")).connection().expect("room");
    let holders_of = |pool: &DescriptorPool, most| {
        let holders = pool.pool.usage(most).holders.into_iter();
        holders.map(|holder| (holder.source, holder.held)).collect::<Vec<_>>()
    };
    assert_eq!(holders_of(&pool, 9), [("source 2001:db8::/64".to_owned(), 1)]);
    let holders = connection.holders().for_identity(&"west".into(), &"a".into());
    connection.move_to(&holders).expect("room");
    let both = [("cluster west".to_owned(), 1), ("identity a".to_owned(), 1)];
    assert_eq!(holders_of(&pool, 9), both);
    assert_eq!(holders_of(&pool, 1).len(), 1);
    drop((connection, holders));
    assert_eq!(pool.pool.used(), 0);
}

#[test]
fn connections_leave_a_fifth_to_tunnels_but_for_those_who_hold_little() {
    let pool = DescriptorPool::new(1000);
    let listener = pool.register_listener();
    let mut held = Vec::new();
    for at in 0..10 {
        let holders = peer(&listener, &format!("c{at}"), &format!("i{at}"));
        held.extend(std::iter::from_fn(|| holders.connection().ok()));
    }
    assert!((795..=880).contains(&held.len()), "{}", held.len());
    assert!(peer(&listener, "quiet", "quiet").connection().is_ok());
}

#[test]
fn memory_bounds_the_pool_while_it_is_short() {
    let pool = DescriptorPool::new(10_000);
    let listener = pool.register_listener();
    pool.set_memory(100 * DESCRIPTOR_BYTES);
    let holders = peer(&listener, "west", "a");
    let held = fill(&holders);
    assert_eq!((held.len(), pool.handshakes_max()), (50, 1));
    pool.set_memory(0);
    assert_eq!(holders.dial().unwrap_err(), LimitReached::Memory);
    assert!(pool.pipe_end().is_none() && !listener.has_free_descriptor());
    pool.set_memory(usize::MAX);
    assert!(holders.dial().is_ok());
}

#[test]
fn pipes_leave_a_quarter_and_no_pool_is_passed() {
    let pool = DescriptorPool::new(100);
    let listener = pool.register_listener();
    let pipes: Vec<_> = std::iter::from_fn(|| pool.pipe_end()).collect();
    assert_eq!(pipes.len(), 75);
    let mut held = Vec::new();
    for at in 0..10 {
        held.extend(fill(&listener.source([10, 0, 0, at].into())));
    }
    assert!(pool.pool.used() <= 100);
    assert_eq!(pipes.len() + held.len(), pool.pool.used());
}
