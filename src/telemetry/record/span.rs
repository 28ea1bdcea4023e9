//! Span of a tunnel, built from its record at the end.

use opentelemetry::trace::Status;
use opentelemetry::{KeyValue, Value};
use opentelemetry_sdk::trace::SpanData;
use tracing::Level;

use super::{Record, non_empty};
use crate::reason::Reason;
use crate::telemetry::spans::Trace;

impl Record {
    /// Exports the span of the tunnel that ends now, if it is sampled.
    pub(super) fn export_span(&self, reason: Reason) {
        let Some((tracer, trace)) = self.metrics.tracer().zip(self.trace()) else { return };
        let may_have_one =
            || self.open().is_some() || tracer.admits_refusal(&self.source, self.first_peer());
        if trace.is_sampled() && may_have_one() {
            tracer.push(|| self.span(trace, reason));
        }
    }

    /// Returns the span of the tunnel that ends now. Attributes have the names of OpenTelemetry's
    /// semantic conventions. Others have those of the access log, after `strait.`.
    fn span(&self, trace: &Trace, reason: Reason) -> SpanData {
        let mut span = trace.span(self.start);
        let (source, workload) = (&*self.source, self.workload.as_deref());
        let (address, service) = (source.address, non_empty(&self.service.hostname));
        let is_error = reason.level() != Level::INFO;
        let requested = self.authority().and_then(|text| text.rsplit_once(':'));
        let host = requested.map(|(host, _)| host.trim_matches(['[', ']'])).or_else(|| self.sni());
        let port = requested.and_then(|(_, port)| port.parse::<u16>().ok());
        let ip = address.ip().to_string();
        let destination = self.destination.as_ref().map(|it| it.address.to_string());
        let attributes = [
            text("client.address", Some(&ip)),
            number("client.port", address.port().into()),
            text("network.peer.address", Some(&ip)),
            number("network.peer.port", address.port().into()),
            text("server.address", host),
            port.and_then(|port| number("server.port", port.into())),
            text("tls.client.server_name", self.sni()),
            text("error.type", is_error.then(|| reason.label())),
            text("strait.src.identity", non_empty(&source.principal)),
            text("strait.src.cluster", non_empty(&source.cluster)),
            text("strait.src.first_peer", self.first_peer()),
            text("strait.dst.addr", destination.as_deref()),
            text("strait.dst.service", service),
            text("strait.dst.workload", self.pod_name()),
            text("strait.dst.identity", workload.and_then(|it| non_empty(&it.principal))),
            text("strait.dst.cluster", workload.and_then(|it| non_empty(&it.cluster))),
            text("strait.listener", non_empty(&source.listener)),
            number("strait.bytes_sent", self.sent),
            number("strait.bytes_recv", self.received),
            text("strait.reason", Some(reason.label())),
        ];
        span.attributes.extend(attributes.into_iter().flatten());
        // Names have few values: only services of the mesh are a part of them.
        if let Some(service) = service {
            span.name = format!("tunnel {service}").into();
        }
        if is_error {
            let description = self.error(reason).unwrap_or_default().to_owned().into();
            span.status = Status::Error { description };
        }
        span
    }
}

fn text(key: &'static str, value: Option<&str>) -> Option<KeyValue> {
    Some(KeyValue::new(key, value?.to_owned()))
}

fn number(key: &'static str, value: u64) -> Option<KeyValue> {
    Some(KeyValue::new(key, Value::I64(i64::try_from(value).unwrap_or(i64::MAX))))
}
