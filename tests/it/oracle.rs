//! Tests of the byte oracle, which detects every fault of a path.

use h2::Reason;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

use crate::support::oracle::{End, Plan, SideResult, answer, drive, is_consistent};
use crate::support::{Net, bytes, reset, run};

const SIZE: u64 = 100_000;
const PLAN: Plan = Plan { up: SIZE, down: SIZE / 2, ..Plan::both(7, 0) };

#[test]
fn a_good_path_is_whole_for_both_sides() {
    run(async {
        for plan in [PLAN, Plan::both(8, 0), Plan::both(9, 1), Plan::both(u64::MAX, 16 * 1024)] {
            let (near, far) = duplex(1000);
            let (client, (plan_read, endpoint)) = tokio::join!(drive(near, plan), answer(far));
            assert_eq!(plan_read.map(|plan_read| plan_read.id), Some(plan.id));
            assert_eq!(client, SideResult::complete(plan.down));
            assert_eq!(endpoint, SideResult::complete(plan.up));
            assert!(is_consistent(client, endpoint));
        }
    });
}

/// Plays the other side by a script: sends these bytes and ends, regardless of the received bytes.
async fn script(stream: DuplexStream, bytes: &[u8]) {
    let (mut read, mut write) = tokio::io::split(stream);
    let send = async {
        // A side that has detected a fault stops reading.
        if write.write_all(bytes).await.is_ok() {
            let _ = write.shutdown().await;
        }
    };
    let mut sink = tokio::io::sink();
    let (copied, ()) = tokio::join!(tokio::io::copy(&mut read, &mut sink), send);
    copied.expect("bytes");
}

/// Returns the results of an endpoint's side and a client's side for this change of the received
/// bytes.
async fn changed(change: impl Fn(&mut Vec<u8>)) -> [(u64, End); 2] {
    let (near, far) = duplex(1 << 20);
    let mut up = bytes::range(PLAN.id, 0, PLAN.up);
    change(&mut up);
    let sent = [PLAN.head(), up].concat();
    let ((_, endpoint), ()) = tokio::join!(answer(far), script(near, &sent));
    let (near, far) = duplex(1 << 20);
    let mut down = bytes::range(PLAN.down_stream(), 0, PLAN.down);
    change(&mut down);
    let (client, ()) = tokio::join!(drive(near, PLAN), script(far, &down));
    assert!(!is_consistent(client, SideResult::complete(PLAN.up)), "{client:?}");
    assert!(!is_consistent(SideResult::complete(PLAN.down), endpoint), "{endpoint:?}");
    [endpoint, client].map(|side| (side.received, side.end))
}

#[test]
fn every_change_of_a_stream_is_caught_where_it_is() {
    run(async {
        for at in [0, 1, 7, 16 * 1024 - 1, 16 * 1024, 49_999] {
            let offset = at as u64;
            let flipped = changed(|bytes| bytes[at] ^= 1).await;
            assert_eq!(flipped, [(offset, End::Wrong); 2], "a wrong byte");
            let other = changed(|bytes| {
                let length = bytes.len() as u64;
                bytes.splice(at.., bytes::range(PLAN.id + 1, offset, length));
            });
            let ends = other.await.map(|(_, end)| end);
            assert_eq!(ends, [End::Wrong; 2], "bytes of another tunnel");
            let cut = changed(|bytes| bytes.truncate(at)).await;
            assert_eq!(cut, [(offset, End::Short); 2], "a clean end too early");
        }
        for at in [0, 1, 1000, 40_000] {
            let lost = changed(|bytes| _ = bytes.remove(at)).await;
            let doubled = changed(|bytes| bytes.insert(at, bytes[at])).await;
            let block = changed(|bytes| bytes[at..][..2000].rotate_left(1000)).await;
            let again = changed(|bytes| {
                let block = bytes[at..][..4096].to_vec();
                bytes.splice(at..at, block);
            });
            for seen in [lost, doubled, block, again.await] {
                assert_eq!(seen.map(|(_, end)| end), [End::Wrong; 2], "at {at}");
            }
        }
        let longer = changed(|bytes| bytes.push(0)).await;
        assert_eq!(longer, [(PLAN.up, End::Long), (PLAN.down, End::Long)]);
        let twice = changed(|bytes| bytes.extend_from_within(..)).await;
        assert_eq!(twice, [(PLAN.up, End::Long), (PLAN.down, End::Long)]);
    });
}

#[test]
fn two_tunnels_whose_ways_back_are_mixed_up_are_caught() {
    run(async {
        let plans = [Plan::both(1, SIZE), Plan::both(2, SIZE)];
        let [(near, far), (other_near, other_far)] = [duplex(1000), duplex(1000)];
        let (near_read, near_write) = tokio::io::split(near);
        let (other_read, other_write) = tokio::io::split(other_near);
        let (one, other, ..) = tokio::join!(
            drive(tokio::io::join(other_read, near_write), plans[0]),
            drive(tokio::io::join(near_read, other_write), plans[1]),
            answer(far),
            answer(other_far),
        );
        assert_eq!([one.end, other.end], [End::Wrong; 2]);
    });
}

#[test]
fn a_path_that_breaks_is_broken_even_after_the_last_byte() {
    run(async {
        let listener = Net::new().listen(1, 0).await;
        let address = listener.local_addr().expect("an address");
        for sent in [0, 1, SIZE - 1, SIZE] {
            let breaks = async {
                let mut near = tokio::net::TcpStream::connect(address).await.expect("a connection");
                let bytes = [PLAN.head(), bytes::range(PLAN.id, 0, sent)].concat();
                near.write_all(&bytes).await.expect("an open connection");
                // Some bytes of the answer have arrived, so the other side is connected.
                near.read_exact(&mut [0; 100]).await.expect("bytes back");
                reset(near);
            };
            let answers = async {
                let (far, _) = listener.accept().await.expect("a connection");
                answer(far).await.1
            };
            let (endpoint, ()) = tokio::join!(answers, breaks);
            assert_eq!(endpoint.end, End::Broken(None), "after {sent}");
            assert!(endpoint.received <= sent);
        }
    });
}

#[test]
fn a_clean_end_that_nobody_made_fits_nothing() {
    let whole = SideResult::complete(SIZE);
    let broken =
        SideResult { received: 5, end: End::Broken(Some(Reason::CONNECT_ERROR)), finished: false };
    assert!(is_consistent(whole, whole) && is_consistent(broken, broken));
    assert!(!is_consistent(whole, broken) && !is_consistent(broken, whole));
    let finished = SideResult { finished: true, ..broken };
    assert!(is_consistent(whole, finished) && is_consistent(finished, whole));
    for end in [End::Short, End::Long, End::Wrong] {
        let bad = SideResult { end, ..whole };
        assert!(!is_consistent(bad, whole) && !is_consistent(whole, bad), "{end:?}");
    }
}
