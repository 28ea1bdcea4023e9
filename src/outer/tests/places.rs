//! Bursts of tunnels, and gateways whose connections take no tunnels.

use super::*;

/// Opens tunnels to a gateway at once, and returns the results.
async fn burst(gateway: Script, tunnels: usize) -> (Vec<Result<Stream, Failure>>, Scripted) {
    let world = Arc::new(World::new());
    let gateway = world.west(gateway).await;
    let mut tasks = JoinSet::new();
    for _ in 0..tunnels {
        let (world, address) = (Arc::clone(&world), gateway.address);
        tasks.spawn(async move { world.open_at(address, remote("west", &[])).await });
    }
    (tasks.join_all().await, gateway)
}

#[tokio::test(start_paused = true)]
async fn a_burst_of_tunnels_gets_its_connections_at_once() {
    let since = Instant::now();
    let script = Script { delay: Duration::from_secs(1), ..Script::new(Answer::Echo) };
    let (opened, gateway) = burst(script, 250).await;
    let time = since.elapsed();
    assert!(opened.iter().all(Result::is_ok));
    assert!(time < Duration::from_secs(2), "{time:?}");
    assert_eq!(gateway.connections(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_burst_of_one_source_waits_for_more_connections_than_it_may_open_at_once() {
    let script = Script { delay: Duration::from_millis(100), ..Script::new(Answer::Echo) };
    let (opened, _gateway) = burst(script, 1500).await;
    let failed = opened.iter().find_map(|one| one.as_ref().err());
    assert_eq!(failed, None);
}

#[tokio::test(start_paused = true)]
async fn tunnels_wait_as_long_as_connections_are_opened_one_after_the_other() {
    let script =
        Script { delay: Duration::from_millis(450), streams_max: 3, ..Script::new(Answer::Echo) };
    let (opened, gateway) = burst(script, 40).await;
    let failed = opened.iter().find_map(|one| one.as_ref().err());
    assert_eq!(failed, None);
    assert_eq!(gateway.connections(), 14);
}

#[tokio::test]
async fn a_failure_beside_a_new_connection_blames_the_load_and_not_the_gateway() {
    let script = Script { connections_max: 1, streams_max: 3, ..Script::new(Answer::Echo) };
    let (opened, _gateway) = burst(script, 5).await;
    let reasons: Vec<_> =
        opened.iter().filter_map(|one| one.as_ref().err().map(|failure| failure.reason)).collect();
    assert_eq!(reasons, [Reason::RemoteBusy; 2]);
}

#[tokio::test(start_paused = true)]
async fn a_gateway_without_places_gets_few_connections_and_stays_ejected() {
    let _busy = robustness::stop_auto_advance();
    let world = World::new();
    let script = Script { streams_max: 0, ..Script::new(Answer::Echo) };
    let gateway = world.west(script).await;
    let target = target(&gateway);
    world.pool.eject(&target);
    for _ in 0..5 {
        assert_refused(world.open(&gateway).await, Reason::RemoteBusy);
    }
    assert_eq!(gateway.connections(), 3);
    assert!(world.pool.is_ejected(&target));
    tokio::time::advance(Duration::from_secs(1)).await;
    for _ in 0..5 {
        world.open(&gateway).await.expect_err("no place");
    }
    assert_eq!(gateway.connections(), 4, "one more after a pause");
}

#[tokio::test]
async fn an_answer_on_a_new_connection_ends_the_ejection() {
    let (world, gateway) = World::with(Answer::Echo).await;
    let target = target(&gateway);
    world.pool.eject(&target);
    let mut stream = world.open(&gateway).await.expect("a tunnel");
    assert!(!world.pool.is_ejected(&target));
    world.pool.eject(&target);
    drop(world.open(&gateway).await.expect("a tunnel"));
    let is_ejected = world.pool.is_ejected(&target);
    assert!(is_ejected, "a connection of before proves nothing");
    echoes(&mut stream, b"hello").await;
}

#[tokio::test]
async fn an_attempt_that_panics_fails_and_the_next_one_opens_a_connection() {
    let (world, gateway) = World::with(Answer::Echo).await;
    let target = target(&gateway);
    let state = || world.pool.status()[0].state.clone();
    world.pool.simulate_panic(&target, &source("a"));
    assert_eq!(state(), "connecting");
    let ended = async {
        while state() == "connecting" {
            tokio::task::yield_now().await;
        }
    };
    timeout(SOON, ended).await.expect("an end of the attempt");
    assert_eq!(state(), "failed");
    let error = &world.pool.status()[0].error;
    assert!(error.contains("panicked"), "{error}");
    let mut stream = world.open(&gateway).await.expect("a tunnel");
    echoes(&mut stream, b"hello").await;
}

#[tokio::test]
async fn a_request_that_was_not_processed_is_repeated_elsewhere() {
    let (world, gateway) = World::with(Answer::RefuseFirst).await;
    let mut stream = world.open(&gateway).await.expect("a tunnel");
    assert_eq!(gateway.connections(), 2);
    echoes(&mut stream, b"hello").await;
}
