//! Connections of a cluster with a limit of bytes, whose tunnels pause beyond it, in virtual time.

use std::collections::{HashMap, HashSet};
use std::os::unix::net::UnixStream;

use super::mended::frames;
use super::rig::{Rig, TestGateway, drain, fill};
use super::wire::{DATA, Frame, PING, WINDOW_UPDATE};
use super::*;
use crate::limits::turns::{ClusterSettings, WorkerTime};

/// Limit of the cluster in bytes per second.
const LIMIT: u32 = 1 << 20;
const SECONDS: u64 = 20;
/// Times of a second at which peers and endpoints act.
const STEPS: u64 = 100;
/// More tunnels than one turn serves.
const TUNNELS: usize = 90;

/// Gateway with a limit for the cluster of its peer.
pub(super) fn gateway(bytes: Option<u32>) -> TestGateway {
    let cluster = "west".to_owned();
    let settings = ClusterSettings { weight: 10, bytes };
    TestGateway::with(WorkerTime::new(HashMap::from([(cluster, settings)])))
}

/// Connection with one tunnel, and the bytes that have crossed.
struct Busy {
    rig: Rig,
    far: UnixStream,
    is_upload: bool,
    window: usize,
    moved: usize,
    unanswered: u64,
}

impl Busy {
    async fn new(gateway: &TestGateway, is_upload: bool) -> Self {
        let mut rig = Rig::established(gateway).await;
        let far = rig.tunnel(1).await;
        for stream in [0, 1] {
            rig.send(Frame::new(WINDOW_UPDATE, 0, stream, &(1_u32 << 30).to_be_bytes())).await;
        }
        Self { rig, far, is_upload, window: 256 * 1024, moved: 0, unanswered: 0 }
    }

    /// Offers as many bytes as the gateway takes.
    async fn step(&mut self) {
        if self.is_upload {
            while self.window > 0 {
                let part = self.window.min(8 * 1024);
                self.rig.peer.send(&Frame::new(DATA, 0, 1, &vec![7; part]).encode());
                self.window -= part;
            }
            self.rig.pump().await;
            let mut received = Vec::new();
            drain(&mut self.far, &mut received);
            self.moved += received.len();
        } else {
            fill(&mut self.far, &vec![7; 1 << 20]);
        }
        self.rig.pump().await;
        for frame in frames(&mut self.rig) {
            match (frame.kind, frame.stream) {
                (DATA, _) => self.moved += frame.payload.len(),
                (WINDOW_UPDATE, 1) => self.window += frame.number(0) as usize,
                (PING, _) => self.unanswered = 0,
                _ => {}
            }
        }
    }

    async fn ping(&mut self) {
        self.unanswered += 1;
        assert!(self.unanswered <= 1, "a PING waits");
        self.rig.send(Frame::new(PING, 0, 0, &[0; 8])).await;
    }
}

#[tokio::test(start_paused = true)]
async fn connections_of_a_cluster_share_its_limit_of_bytes_and_answer_pings() {
    let gateway = gateway(Some(LIMIT));
    let mut all = Vec::new();
    for is_upload in [false, false, true, true] {
        all.push(Busy::new(&gateway, is_upload).await);
    }
    for step in 0..SECONDS * STEPS {
        for one in &mut all {
            if step % STEPS == 0 {
                one.ping().await;
            }
            one.step().await;
        }
        tokio::time::advance(Duration::from_secs(1) / 100).await;
    }
    let moved: Vec<_> = all.iter().map(|one| one.moved).collect();
    let sum: usize = moved.iter().sum();
    let limit = LIMIT as usize * 20;
    assert!((limit * 9 / 10..=limit * 11 / 10).contains(&sum), "{moved:?}");
    assert!(moved.iter().all(|&one| one > sum / 10), "{moved:?}");
    let running: Vec<_> = all.iter().map(|one| one.rig.is_running()).collect();
    assert_eq!(running, [true; 4]);
    let paused: Duration = gateway.data_path.turns.used().iter().map(|row| row.paused).sum();
    assert!(paused > Duration::from_secs(SECONDS), "{paused:?}");
}

#[tokio::test(start_paused = true)]
async fn a_cluster_below_its_limit_or_without_one_never_pauses() {
    for limit in [None, Some(u32::MAX)] {
        let gateway = gateway(limit);
        let mut busy = Busy::new(&gateway, true).await;
        for _ in 0..50 {
            busy.step().await;
        }
        assert!(busy.moved > 4 << 20, "{}", busy.moved);
        let used = gateway.data_path.turns.used();
        assert!(used.iter().all(|row| row.paused.is_zero()), "{used:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn every_tunnel_of_a_connection_that_pauses_has_its_turn() {
    let gateway = gateway(Some(LIMIT));
    let mut rig = Rig::established(&gateway).await;
    let window = (1_u32 << 30).to_be_bytes();
    rig.send(Frame::new(WINDOW_UPDATE, 0, 0, &window)).await;
    let mut endpoints = Vec::new();
    for stream in (1..).step_by(2).take(TUNNELS) {
        endpoints.push(rig.tunnel(stream).await);
        rig.send(Frame::new(WINDOW_UPDATE, 0, stream, &window)).await;
    }
    let mut served = HashSet::new();
    for _ in 0..600 {
        for endpoint in &mut endpoints {
            fill(endpoint, &[7; 256 * 1024]);
        }
        rig.pump().await;
        let data = frames(&mut rig).into_iter().filter(|frame| frame.kind == DATA);
        served.extend(data.map(|frame| frame.stream));
        tokio::time::advance(Duration::from_millis(500)).await;
    }
    assert_eq!(served.len(), TUNNELS);
}
