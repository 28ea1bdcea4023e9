//! Explanation as plain data: the JSON of `strait explain -o json`, from which its text is
//! rendered.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::reason::{HandshakeRefusal, Reason};

/// Predicted outcome of a tunnel, with the decisions that lead to it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Answer {
    /// Version of the snapshot that was evaluated.
    pub snapshot: u64,
    pub listener: ListenerRow,
    pub peer: PeerRow,
    /// Lookups with their policy evaluation, in order. One as a rule; two if the server name of
    /// the TLS inside a tunnel decides, the authority first.
    #[serde(rename = "legs")]
    pub lookups: Vec<LookupRow>,
    /// Groups of endpoints with their shares of the picks; empty if nothing would be picked.
    pub groups: Vec<GroupRow>,
    /// Fraction of ready endpoints below which a tier gives some of its share to the next tier;
    /// none without tiers.
    pub spill: Option<String>,
    /// The same fraction in percent.
    #[serde(default)]
    pub spill_percent: Option<u64>,
    /// True if dial latency counts as load.
    pub by_latency: bool,
    /// Permission of the tunnel to leave the network, as text; none if no other network has
    /// instances of the service.
    pub transit: Option<String>,
    /// Mode of Istio's policies: `off`, `audit` or `enforce`.
    pub policies: String,
    /// Fraction of tunnels that is rejected before any pick: the drop overloads of an Envoy
    /// assignment.
    pub dropped: f64,
    /// Endpoints that can be picked, the most probable first.
    pub endpoints: Vec<EndpointRow>,
    /// Number of endpoints that are not listed.
    pub more_endpoints: usize,
    /// Workloads of the service that cannot be picked.
    pub unused: Vec<UnusedRow>,
    /// Number of unused workloads that are not listed.
    pub more_unused: usize,
    /// Remarks for the reader.
    pub notes: Vec<String>,
    pub outcome: Outcome,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ListenerRow {
    pub name: String,
    /// Protocol: `hbone`, `tls` or `binding`.
    pub protocol: String,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PeerRow {
    /// SPIFFE identity; none on TLS listeners.
    pub identity: Option<String>,
    /// Cluster, by the certificate's issuer or the trust domain; none if the handshake fails.
    pub cluster: Option<String>,
    /// Description of both as text.
    #[serde(rename = "said")]
    pub description: String,
}

/// One lookup and its policy evaluation.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LookupRow {
    /// Requested `host:port`, or a server name that is not routable.
    #[serde(rename = "asked")]
    pub requested: String,
    /// Origin of the requested name, if it is not the authority itself.
    pub from: Option<String>,
    /// Service port that was found, if any.
    pub route: Option<RouteRow>,
    /// Rule that allows or rejects it.
    pub rule: RuleRow,
}

/// Service port of a lookup.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RouteRow {
    pub service: String,
    pub port: u16,
    /// Kind of match: `hostname`, `exposedName`, `alias`, `family`, `vip` or `workload`.
    pub by: String,
    #[serde(rename = "said")]
    pub description: String,
    /// True if the tunnel goes to a waypoint.
    pub by_waypoint: bool,
    /// Reason for which it does or does not, as text; none for a service without waypoints.
    pub waypoint: Option<String>,
    /// Routing mode of the tunnel: `authority`, `sni` or `strict`.
    pub route_by: String,
}

/// Rule that allows or rejects a tunnel.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RuleRow {
    /// True if the rule allows the tunnel.
    pub allowed: bool,
    #[serde(rename = "said")]
    pub description: String,
    /// Entries of `exposure.services` that were evaluated, in the order of the list; if one
    /// allows the tunnel, only that one.
    pub entries: Vec<EntryRow>,
    /// Configuration change that would allow the tunnel; none if it is allowed.
    pub change: Option<String>,
}

/// Entry of `exposure.services`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EntryRow {
    /// Index in the list, from 0.
    pub index: usize,
    /// First line of the entry in the file, if the file is known.
    pub line: Option<u64>,
    /// File of the entry, if a Kubernetes object describes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// Audiences that the entry admits.
    pub to: Vec<String>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GroupRow {
    /// Waypoint that the endpoints belong to.
    pub waypoint: Option<String>,
    /// Criterion that the endpoints have in common.
    pub tier: String,
    /// Locality of the endpoints, if localities have weights.
    pub place: Option<String>,
    pub weight: Option<u32>,
    /// Share of all picks while each group has an endpoint that can be picked.
    pub share: f64,
    /// Number of ready endpoints.
    pub ready: u32,
    /// Number of endpoints that are not drained; none without tiers.
    pub all: Option<u32>,
}

/// Endpoint that can be picked.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointRow {
    pub workload: Arc<str>,
    pub address: String,
    /// Protocol: `HBONE` or `TCP`.
    pub protocol: String,
    /// Network behind the gateway at this address; none for an endpoint of the own network.
    pub network: Option<Arc<str>>,
    /// Cluster of the workload, or of the gateway if it is known.
    pub cluster: Arc<str>,
    /// Locality as `region/zone/subzone`, as far as it is known.
    pub locality: String,
    pub group: usize,
    pub weight: u32,
    /// Factor of the weight by what the gateway at the address has advertised, by its round trip
    /// time, and by an exceeded budget of the link to its cluster; 1 without any.
    pub factor: f64,
    /// Number of tunnels in flight.
    pub tunnels: u32,
    /// Probability of the first pick, given current loads and ejections.
    #[serde(rename = "odds")]
    pub probability: f64,
    /// Seconds until the ejection ends; none if the endpoint is not ejected.
    pub ejected: Option<u64>,
    /// The same time.
    #[serde(default)]
    pub ejected_seconds: Option<u64>,
    /// Certificate that the gateway has to present; none for an endpoint of the own network.
    pub gateway_certificate: Option<String>,
    /// Certificate that the workload behind the gateway has to present; none if it is not
    /// verified.
    pub workload_certificate: Option<String>,
    /// Reason for which the endpoint would be rejected after a pick, if any.
    pub refused: Option<String>,
    /// Rejection by a policy that only logs, if any.
    pub audited: Option<String>,
}

/// Workload that cannot be picked.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UnusedRow {
    /// Uid of the workload.
    pub workload: Arc<str>,
    /// Reason for which it cannot be picked.
    pub why: String,
}

/// Outcome as the peer observes it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Outcome {
    /// True if the tunnel would be opened, provided that the endpoint answers.
    pub opened: bool,
    /// Reason in the log and the metrics; none for a tunnel that is opened.
    pub reason: Option<String>,
    /// HTTP status of the answer to CONNECT.
    pub status: Option<u16>,
    /// TLS alert, on a TLS listener or in the handshake.
    pub alert: Option<u8>,
    /// RST_STREAM code of a tunnel that is reset after its answer.
    pub reset: Option<String>,
    #[serde(rename = "said")]
    pub description: String,
    /// Other possible outcomes, if random choices decide.
    pub or: Vec<Self>,
}

/// Form in which a rejection reaches the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RejectionForm {
    /// Answer to CONNECT.
    Status,
    /// Reset of a tunnel that was answered already.
    Reset,
    /// TLS alert in place of a ServerHello.
    Alert,
    /// Reset of the connection of a binding's client.
    Connection,
}

impl Outcome {
    /// Returns the outcome of an opened tunnel.
    pub fn opened(form: RejectionForm) -> Self {
        let description = match form {
            RejectionForm::Alert => "opened, if the endpoint answers: the ClientHello is forwarded",
            RejectionForm::Status | RejectionForm::Reset => "opened, if the endpoint answers: 200",
            RejectionForm::Connection => {
                "opened, if the gateway and the service behind it answer: the bytes of the client \
                 are forwarded"
            }
        };
        let has_status = matches!(form, RejectionForm::Status | RejectionForm::Reset);
        Self {
            opened: true,
            status: has_status.then_some(200),
            description: description.to_owned(),
            ..Self::default()
        }
    }

    /// Returns the outcome of a rejected tunnel.
    pub fn refused(reason: Reason, form: RejectionForm) -> Self {
        let mut outcome = Self { reason: Some(reason.label().to_owned()), ..Self::default() };
        let what = match form {
            RejectionForm::Status => {
                let status = reason.status().as_u16();
                outcome.status = Some(status);
                format!("{status}")
            }
            RejectionForm::Reset => {
                let code = format!("{:?}", reason.reset_after_answer());
                outcome.status = Some(200);
                outcome.reset = Some(code.clone());
                format!("200, then RST_STREAM {code}")
            }
            RejectionForm::Alert => {
                let alert = reason.alert();
                outcome.alert = Some(alert);
                format!("TLS alert {alert}")
            }
            RejectionForm::Connection => "the connection is reset".to_owned(),
        };
        outcome.description = format!("rejected: {what} ({reason})");
        outcome
    }

    /// Returns the outcome of a rejected handshake. rustls chooses the alert.
    pub fn handshake_rejected(refusal: HandshakeRefusal) -> Self {
        Self {
            reason: Some(refusal.label().to_owned()),
            description: format!("rejected in the handshake, by a TLS alert ({refusal})"),
            ..Self::default()
        }
    }

    /// Returns the outcome of a connection that is reset before any byte is read from it.
    pub fn not_in_sources() -> Self {
        Self {
            reason: Some("not_in_sources".to_owned()),
            description: "the connection is reset (not_in_sources)".to_owned(),
            ..Self::default()
        }
    }

    /// Returns the outcome of a connection to a gateway whose listeners are closed.
    pub fn not_accepting(why: &str) -> Self {
        Self {
            reason: Some(why.to_owned()),
            description: format!("the connection is refused ({why})"),
            ..Self::default()
        }
    }

    /// Returns all possible outcomes, this one first.
    pub fn all(&self) -> impl Iterator<Item = &Self> {
        std::iter::once(self).chain(&self.or)
    }
}
