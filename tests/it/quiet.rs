//! Tests of the limit of waits that have no deadline of their own.

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, duplex};
use tokio::time::{Instant, sleep};

use crate::support::process::{QUIET_MAX, watched};

#[tokio::test(start_paused = true)]
#[should_panic(expected = "the test waits for something that does not happen")]
async fn a_read_that_never_ends_fails_in_seconds() {
    let (mut stream, _open) = duplex(16);
    watched(stream.read_u8()).await.expect("a byte");
}

#[tokio::test(start_paused = true)]
async fn a_long_test_with_short_waits_passes() {
    let start = Instant::now();
    watched(async {
        for _ in 0..10 {
            // deadline: the clock is paused. The odd part keeps it apart from the timers.
            sleep(QUIET_MAX.mul_f64(0.7) + Duration::from_millis(1)).await;
        }
    })
    .await;
    assert!(start.elapsed() > 5 * QUIET_MAX);
}

#[tokio::test(start_paused = true)]
async fn a_machine_that_stands_still_fails_no_test() {
    watched(async {
        // deadline: the clock is paused.
        sleep(Duration::from_millis(1)).await;
        tokio::time::advance(10 * QUIET_MAX).await;
    })
    .await;
}
