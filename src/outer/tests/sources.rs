//! Sources, which share neither connections nor their ends.

use super::*;
use crate::outer::gateway::SILENCE_TIME;

#[tokio::test]
async fn an_end_by_an_error_resets_the_tunnels_of_one_source_and_the_request_is_not_repeated() {
    for answer in [
        Answer::GoAwayAfter(h2::Reason::ENHANCE_YOUR_CALM),
        Answer::GoAwayAfter(h2::Reason::PROTOCOL_ERROR),
        Answer::Abort,
    ] {
        let world = World::new();
        let gateway = world.west(Script::new(answer)).await;
        let at = target(&gateway);
        let mut victim = world.open_for("victim", &at, "echo.app:80").await.expect("a tunnel");
        let mut own = world.open_for("attacker", &at, "echo.app:80").await.expect("a tunnel");
        assert_eq!(gateway.connections(), 2);
        let before = gateway.requests.load(Ordering::SeqCst);
        for _ in 0..5 {
            assert_refused(world.open_for("attacker", &at, POISON).await, Reason::GatewayReset);
        }
        assert_eq!(gateway.requests.load(Ordering::SeqCst) - before, 5);
        let ended = timeout(SOON, read_to_end(&mut own)).await.expect("an end");
        assert!(ended.is_err(), "its own tunnel");
        echoes(&mut victim, b"hello").await;
        let lost = async |account| {
            let refused = world.try_open(&source(account), &at, POISON).await;
            refused.expect_err("an error")
        };
        let own = lost("attacker").await;
        assert!(matches!(own, OpenError::Tunnel(_)), "one source proves nothing: {own:?}");
        let second = lost("other").await;
        assert!(matches!(second, OpenError::Gateway(_)), "two sources: {second:?}");
        let next = world.open_for("victim", &at, "echo.app:80").await.expect("a tunnel");
        let third = lost("attacker").await;
        assert!(matches!(third, OpenError::Tunnel(_)), "it has answered: {third:?}");
        drop(next);
    }
}

#[tokio::test]
async fn a_request_whose_stream_is_reset_is_not_repeated_and_its_connection_goes_on() {
    let world = World::new();
    let code = h2::Reason::PROTOCOL_ERROR;
    let gateway = world.west(Script::new(Answer::Reset(code))).await;
    let at = target(&gateway);
    let mut open = world.open_for("a", &at, "echo.app:80").await.expect("a tunnel");
    assert_refused(world.open_for("a", &at, POISON).await, Reason::GatewayReset);
    assert_eq!(gateway.requests.load(Ordering::SeqCst), 2);
    assert_eq!(gateway.connections(), 1);
    echoes(&mut open, b"hello").await;
}

#[tokio::test(start_paused = true)]
async fn at_the_limit_a_source_waits_for_a_connection_of_its_own_and_idle_ones_make_room() {
    let _busy = robustness::stop_auto_advance();
    let (world, gateway) = World::with(Answer::Echo).await;
    let at = target(&gateway);
    world.pool.simulate_limits(&at, 100, 2);
    let first = world.open_for("a", &at, "echo.app:80").await.expect("a tunnel");
    let mut second = world.open_for("b", &at, "echo.app:80").await.expect("a tunnel");
    let since = Instant::now();
    let waiting = world.open_for("c", &at, "echo.app:80");
    let advance = tokio::time::advance(Duration::from_secs(1));
    let (refused, ()) = tokio::join!(waiting, advance);
    assert_refused(refused, Reason::RemoteBusy);
    assert!(since.elapsed() <= Duration::from_secs(2));
    drop(first);
    let mut third = world.open_for("c", &at, "echo.app:80").await.expect("a tunnel");
    assert_eq!(gateway.connections(), 3);
    let row = &world.pool.status()[0];
    assert_eq!((row.connections, row.sources, row.tunnels), (2, 2, 2));
    echoes(&mut second, b"hello").await;
    echoes(&mut third, b"hello").await;
}

#[tokio::test]
async fn while_few_connections_are_left_idle_ones_of_other_clusters_make_room() {
    let (world, gateway) = World::with(Answer::Echo).await;
    let at = target(&gateway);
    world.pool.simulate_limits(&at, 100, 32);
    let of =
        |cluster: &str, account: &str| Source::cluster(&cluster.into()).identity(&account.into());
    for cluster in 0..30 {
        let idle = of(&cluster.to_string(), "a");
        drop(world.try_open(&idle, &at, "echo.app:80").await.expect("a tunnel"));
    }
    let mut first = world.try_open(&of("busy", "a"), &at, "echo.app:80").await.expect("a tunnel");
    assert_eq!(world.pool.status()[0].connections, 31);
    let mut second = world.try_open(&of("busy", "b"), &at, "echo.app:80").await.expect("a tunnel");
    assert_eq!(world.pool.status()[0].connections, 31, "one idle connection less");
    echoes(&mut first, b"hello").await;
    echoes(&mut second, b"hello").await;
}

#[tokio::test]
async fn connections_have_descriptors_of_the_process_and_its_lack_is_no_failure_of_the_gateway() {
    let (world, gateway) = World::with(Answer::Echo).await;
    let at = target(&gateway);
    let descriptors = world.pool.descriptors();
    let stream = world.open_for("a", &at, "echo.app:80").await.expect("a tunnel");
    assert_eq!(descriptors.used(), 1);
    let others = descriptors.account(&Source::prefix([192, 0, 2, 1].into())).charge(DESCRIPTORS);
    let overloaded = |refused: Option<OpenError>| match refused {
        Some(OpenError::Tunnel(failure)) => failure.reason == Reason::Overloaded,
        other => panic!("{other:?}"),
    };
    let refused = world.try_open(&source("b"), &at, "echo.app:80").await.err();
    assert!(overloaded(refused), "none is left");
    drop((stream, others));
    assert_eq!(descriptors.used(), 1, "the idle connection");
    world.open_for("b", &at, "echo.app:80").await.expect("a tunnel");
    let unchecked = Target { address: (UNCHECKED, 15008).into(), ..at };
    let refused = world.try_open(&source("a"), &unchecked, "echo.app:80").await.err();
    assert!(overloaded(refused), "no check, and no failure of the gateway");
}

#[tokio::test(start_paused = true)]
async fn a_gateway_fails_once_two_sources_have_waited_for_two_services_in_vain() {
    let (world, gateway) = World::with(Answer::EchoOrNone).await;
    let at = target(&gateway);
    let is_of_gateway = async |account, authority| {
        let opened = world.try_open(&source(account), &at, authority).await;
        matches!(opened.expect_err("no answer"), OpenError::Gateway(_))
    };
    assert!(!is_of_gateway("a", "one.app:80").await);
    assert!(!is_of_gateway("a", "two.app:80").await, "one source");
    assert!(!is_of_gateway("b", "two.app:80").await, "one service");
    world.open_for("c", &at, "echo.app:80").await.expect("a tunnel");
    assert!(!is_of_gateway("a", "one.app:80").await, "another one was answered");
    assert!(is_of_gateway("b", "two.app:80").await);
    world.pool.eject(&at);
    assert!(is_of_gateway("b", "two.app:80").await, "no answer since the ejection");
    world.open_for("c", &at, "echo.app:80").await.expect("a tunnel");
    assert!(!is_of_gateway("b", "two.app:80").await, "an answer on the old connection");
    tokio::time::advance(SILENCE_TIME).await;
    assert!(!is_of_gateway("a", "one.app:80").await, "too long ago");
}

#[tokio::test]
async fn one_source_leaves_places_at_a_gateway_to_others() {
    let (world, gateway) = World::with(Answer::Echo).await;
    let at = target(&gateway);
    world.pool.simulate_limits(&at, 64, 64);
    let mut open = Vec::new();
    let refused = loop {
        match world.open_for("attacker", &at, "echo.app:80").await {
            Ok(stream) => open.push(stream),
            Err(refused) => break refused,
        }
    };
    assert_eq!(refused.reason, Reason::RemoteBusy, "{refused:?}");
    assert!((24..=40).contains(&open.len()), "{}", open.len());
    for account in ["a", "b", "c", "d"] {
        let mut stream = world.open_for(account, &at, "echo.app:80").await.expect("a tunnel");
        echoes(&mut stream, b"hello").await;
    }
    drop(open);
    let again = world.open_for("attacker", &at, "echo.app:80").await;
    again.expect("places are given back");
}

#[tokio::test]
async fn a_burst_of_many_sources_gets_a_connection_each() {
    const SOURCES: usize = 200;
    let world = Arc::new(World::new());
    let gateways =
        [world.west(Script::new(Answer::Echo)).await, world.west(Script::new(Answer::Echo)).await];
    let mut tasks = JoinSet::new();
    for index in 0..SOURCES {
        let (world, at) = (Arc::clone(&world), target(&gateways[index % 2]));
        tasks.spawn(async move {
            let account = index.to_string();
            loop {
                match world.open_for(&account, &at, "echo.app:80").await {
                    Ok(stream) => return stream,
                    // Of the attempts, a debug build finishes a part in time.
                    Err(busy) => assert_eq!(busy.reason, Reason::RemoteBusy, "{busy:?}"),
                }
            }
        });
    }
    let streams = tasks.join_all().await;
    let rows = world.pool.status();
    let sum =
        |count: fn(&crate::status::GatewayRow) -> usize| rows.iter().map(count).sum::<usize>();
    assert_eq!(sum(|row| row.sources), SOURCES);
    assert_eq!(sum(|row| row.connections), SOURCES);
    assert_eq!(sum(|row| row.tunnels), streams.len());
}
