//! An answer as plain data: what `strait explain --json` prints, and its text is made of.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::reason::{HandshakeRefusal, Reason};

use super::super::tunnel::NOWHERE;

/// What would become of a tunnel, and why.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Answer {
    /// The version of the snapshot that was looked at.
    pub snapshot: u64,
    /// Where the peer connects.
    pub listener: ListenerRow,
    /// Who asks.
    pub peer: PeerRow,
    /// What is looked up and judged, in order: as a rule once, and where the server name of the TLS
    /// inside a tunnel decides, the authority first.
    pub legs: Vec<Leg>,
    /// How picks are shared among groups of endpoints; empty where nothing would be picked.
    pub groups: Vec<GroupRow>,
    /// Below which part of ready endpoints a tier leaves some of its share to the next one, where
    /// there are tiers.
    pub spill: Option<String>,
    /// Whether the time that dials take counts as load.
    pub by_latency: bool,
    /// What is done about Istio's policies: `off`, `audit` or `enforce`.
    pub policies: String,
    /// The part of tunnels that is refused whatever is picked: the drop overloads of an Envoy
    /// assignment.
    pub dropped: f64,
    /// The endpoints that could be picked, the likeliest first.
    pub endpoints: Vec<EndpointRow>,
    /// How many of them are not listed.
    pub more_endpoints: usize,
    /// The workloads of the service that cannot be picked.
    pub unused: Vec<UnusedRow>,
    /// How many of them are not listed.
    pub more_unused: usize,
    /// What to know beside it.
    pub notes: Vec<String>,
    /// What the peer would see.
    pub outcome: Outcome,
}

/// A listener.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ListenerRow {
    /// Its name in the configuration.
    pub name: String,
    /// `hbone` or `tls`.
    pub protocol: String,
}

/// A peer.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PeerRow {
    /// Its identity; none on TLS listeners.
    pub identity: Option<String>,
    /// The cluster, by its issuer or its trust domain; none if it is refused.
    pub cluster: Option<String>,
    /// What that means, in words.
    pub said: String,
}

/// One look-up and its judgement.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Leg {
    /// What is looked up: `host:port`, or a server name that is none.
    pub asked: String,
    /// How it came to be asked for, where it is not the authority as it stands.
    pub from: Option<String>,
    /// The service, if there is one.
    pub route: Option<RouteRow>,
    /// What allows or refuses it.
    pub rule: RuleRow,
}

/// A service port that was found.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RouteRow {
    /// `namespace/hostname`.
    pub service: String,
    /// Its port.
    pub port: u16,
    /// What leads there: `hostname`, `exposedName`, `alias`, `family`, `vip` or `workload`.
    pub by: String,
    /// The same, in words.
    pub said: String,
    /// Whether the tunnel goes to a waypoint.
    pub by_waypoint: bool,
    /// Why it does or does not, in words; none of a service without.
    pub waypoint: Option<String>,
    /// By what the tunnel is routed: `authority`, `sni` or `strict`.
    pub route_by: String,
}

/// What allows or refuses a tunnel.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RuleRow {
    /// Whether it allows.
    pub allowed: bool,
    /// The same, in words.
    pub said: String,
    /// The entries of `exposure.services` that were looked at, by their places in the list; where
    /// one allows, that one.
    pub entries: Vec<EntryRow>,
    /// What to write so that it would be allowed, where it is not.
    pub change: Option<String>,
}

/// An entry of `exposure.services`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EntryRow {
    /// Its place in the list, from 0.
    pub index: usize,
    /// The line of the file that it begins at, where the file is known.
    pub line: Option<u64>,
    /// Whom it admits.
    pub to: Vec<String>,
}

/// A group of endpoints.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GroupRow {
    /// The waypoint that its endpoints are of.
    pub waypoint: Option<String>,
    /// What they have in common.
    pub tier: String,
    /// Their place, where places have weights,
    pub place: Option<String>,
    /// and its weight.
    pub weight: Option<u32>,
    /// Its part of all picks while each group has an endpoint that may be picked.
    pub share: f64,
    /// How many of its endpoints are ready,
    pub ready: u32,
    /// of how many that are not drained, where groups are told apart by it.
    pub all: Option<u32>,
}

/// An endpoint that could be picked.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointRow {
    /// The uid of its workload.
    pub workload: Arc<str>,
    /// What is dialled.
    pub address: String,
    /// `HBONE` or `TCP`.
    pub protocol: String,
    /// The cluster of the workload.
    pub cluster: Arc<str>,
    /// `region/zone/subzone`, as far as it is known.
    pub locality: String,
    /// The place of its group in `groups`.
    pub group: usize,
    /// Its weight.
    pub weight: u32,
    /// Its tunnels in flight.
    pub tunnels: u32,
    /// How likely it is the first pick, as loads and ejections are now.
    pub odds: f64,
    /// For how many seconds it is ejected, if it is.
    pub ejected: Option<u64>,
    /// Why it would not serve if it were picked, if it would not.
    pub refused: Option<String>,
    /// What policies that only log say.
    pub audited: Option<String>,
}

/// A workload that cannot be picked.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UnusedRow {
    /// Its uid.
    pub workload: Arc<str>,
    /// Why.
    pub why: String,
}

/// What the peer would see.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Outcome {
    /// Whether a tunnel would be opened, if the endpoint answers.
    pub opened: bool,
    /// The reason in the log and the metrics; none of a tunnel that is opened.
    pub reason: Option<String>,
    /// The status by which CONNECT is answered.
    pub status: Option<u16>,
    /// The TLS alert, on a TLS listener or in the handshake.
    pub alert: Option<u8>,
    /// The code of RST_STREAM by which a tunnel ends that was answered before.
    pub reset: Option<String>,
    /// The same, in words.
    pub said: String,
    /// What may come instead, where draws decide.
    pub or: Vec<Self>,
}

/// How a refusal reaches the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// As the answer to CONNECT.
    Status,
    /// As the reset of a tunnel that was answered already.
    Reset,
    /// As an alert instead of a ServerHello.
    Alert,
}

impl Outcome {
    /// A tunnel is opened.
    pub fn opened(form: Form) -> Self {
        let said = match form {
            Form::Alert => "opened, if the endpoint answers: the hello is passed on",
            Form::Status | Form::Reset => "opened, if the endpoint answers: 200",
        };
        Self {
            opened: true,
            status: (form != Form::Alert).then_some(200),
            said: said.to_owned(),
            ..Self::default()
        }
    }

    /// A tunnel is refused.
    pub fn refused(reason: Reason, form: Form) -> Self {
        let mut outcome = Self {
            reason: Some(reason.label().to_owned()),
            ..Self::default()
        };
        let what = match form {
            Form::Status => {
                let status = reason.status().as_u16();
                outcome.status = Some(status);
                format!("{status}")
            }
            Form::Reset => {
                let code = format!("{:?}", NOWHERE);
                outcome.status = Some(200);
                outcome.reset = Some(code.clone());
                format!("200, then RST_STREAM {code}")
            }
            Form::Alert => {
                let alert = reason.alert();
                outcome.alert = Some(alert);
                format!("TLS alert {alert}")
            }
        };
        outcome.said = format!("refused: {what} ({reason})");
        outcome
    }

    /// A handshake is refused. Which alert the peer is sent is rustls' affair.
    pub fn of_handshake(refusal: HandshakeRefusal) -> Self {
        Self {
            reason: Some(refusal.label().to_owned()),
            said: format!("refused in the handshake, by a TLS alert ({refusal})"),
            ..Self::default()
        }
    }

    /// The connection is reset before a byte is read from it.
    pub fn elsewhere() -> Self {
        Self {
            reason: Some("not_in_sources".to_owned()),
            said: "the connection is reset (not_in_sources)".to_owned(),
            ..Self::default()
        }
    }

    /// All outcomes that are possible, this one first.
    pub fn all(&self) -> impl Iterator<Item = &Self> {
        std::iter::once(self).chain(&self.or)
    }
}
